"""Which commit the code that trains is of."""

from __future__ import annotations

import subprocess

from vit_examples.launch import ROOT

#: Training runs nothing else of the repository.
_CODE = ("vit_examples", "zeroresize")


def commit_of_code() -> str:
    """Short hash of the commit, with ``-dirty`` where the code differs from it.

    Empty where the code is no git checkout, or git is missing.
    """
    try:
        _git("ls-files", "--error-unmatch", *_CODE)  # it may lie, untracked, within a repository of something else
        changes = _git("status", "--porcelain", "--", *_CODE)
        return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
