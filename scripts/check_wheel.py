"""Build a wheel and an sdist, and try the wheel away from the checkout: python scripts/check_wheel.py [--release]

The wheel of the sdist must hold the same files. Beside the wheel the environment sees what this one has installed. With
``--release`` the wheel is tried in fresh environments, too, alone and with each extra, none of which may replace torch;
and the version must be one that has no tag yet, or that of this commit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATUS = {
    **{
        "kind": "units",
        "state": "on",
        "step": 10,
        "time": 0.0,
        "step_s": 0.1,
        "expected_step_s": 0.1,
        "even_step_s": 0.2,
    },
    **{"saved_s": 1.0, "cost_s": 0.0, "ranks": [], "decided": ""},
}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it prints; what it says where it fails ends this program."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(each) for each in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} has failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def wheel_of(source: Path, folder: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents_of(wheel: Path) -> set[tuple[str, int]]:
    """The files in it, with their check sums."""
    with zipfile.ZipFile(wheel) as archive:
        return {(file.filename, file.CRC) for file in archive.infolist()}


def try_commands(python: Path, folder: Path) -> None:
    """Run commands in an empty folder, which ``rich`` and what ``report`` needs are there for."""
    (folder / "status.jsonl").write_text(json.dumps(STATUS) + "\n")
    for arguments in (["--help"], ["live", "--once", "status.jsonl"], ["report", "status.jsonl"]):
        run(python, "-m", "zeroresize.commands", *arguments, cwd=folder)


def check_version(version: str) -> None:
    """What cites the package names its version, and no other commit has its tag."""
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        sys.exit(f"CITATION.cff names another version than zeroresize.__version__, which is {version}")
    if run("git", "tag", "--list", f"v{version}", cwd=ROOT) and f"v{version}" not in tags_here():
        sys.exit(f"v{version} is the tag of another commit: raise zeroresize.__version__, or check that commit out")
    if others := [tag for tag in tags_here() if tag.startswith("v") and tag != f"v{version}"]:
        sys.exit(f"this commit has the tag {others[0]}, but zeroresize.__version__ is {version}")


def tags_here() -> list[str]:
    return run("git", "tag", "--points-at", "HEAD", cwd=ROOT).split()


def try_fresh(wheel: Path, folder: Path) -> None:
    """Install the wheel in fresh environments, alone and with each extra; Colossal-AI beside the extra of its name."""
    torch = "import torch; print(torch.__version__)"
    core = folder / "core"
    venv.create(core, with_pip=True)
    python = core / "bin" / "python"
    run(python, "-m", "pip", "install", "-qq", f"torch=={metadata.version('torch')}", wheel, cwd=folder)
    (metadata_file,) = core.glob("lib/python*/site-packages/zeroresize-*/METADATA")
    extras = metadata.PathDistribution(metadata_file.parent).metadata.get_all("Provides-Extra") or []
    before = run(python, "-c", torch, cwd=folder)
    run(python, "-c", "import zeroresize as zr; zr.BalanceConfig(), zr.Balancer, zr.watch", cwd=folder)
    for extra in extras:
        print(f"a fresh environment with zeroresize[{extra}]", flush=True)
        fresh = folder / extra
        shutil.copytree(core, fresh, symlinks=True, copy_function=os.link)  # as core is, without another installation
        python = fresh / "bin" / "python"
        run(python, "-m", "pip", "install", "-qq", f"{wheel}[{extra}]", cwd=folder)
        run(python, "-m", "pip", "check", cwd=folder)
        if extra == "colossalai":
            pinned = ROOT / "requirements" / "colossalai.txt"
            run(python, "-m", "pip", "install", "-qq", "--no-deps", "-r", pinned, cwd=folder)
            run(python, "-c", "import zeroresize.integrations.colossalai, colossalai.shardformer", cwd=folder)
        elif extra == "report":
            try_commands(python, fresh)
        if run(python, "-c", torch, cwd=folder) != before:
            sys.exit(f"the extra {extra!r} replaces torch {before.strip()}")
        shutil.rmtree(fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="store_true", help="in fresh environments, too, and whether to tag")
    is_release = parser.parse_args().release
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = {each: folder / each for each in ("first", "again", "sdist", "empty", "source")}
        for path in folders.values():
            path.mkdir()
        copy = folders["source"]
        tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")[:-1]
        for each in tracked:  # so that nothing that was built before is in it
            if (ROOT / each).is_file():
                (copy / each).parent.mkdir(parents=True, exist_ok=True)
                (copy / each).write_bytes((ROOT / each).read_bytes())
        wheel = wheel_of(copy, folders["first"])
        backend = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
        run(sys.executable, "-c", backend, folders["sdist"], cwd=copy)
        (sdist,) = folders["sdist"].glob("*.tar.gz")
        if differing := contents_of(wheel) ^ contents_of(wheel_of(sdist, folders["again"])):
            sys.exit(f"the sdist's wheel has other files: {sorted({name for name, _ in differing})}")
        venv.create(folder / "venv", with_pip=False)
        python = folder / "venv" / "bin" / "python"
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        run(sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", packages, wheel, cwd=folder)
        others = [path for path in site.getsitepackages() if Path(path).is_dir()]
        hide = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each).lower()]"
        (packages / "others.pth").write_text("\n".join([*others, hide]) + "\n")
        place = run(python, "-c", "import zeroresize; print(zeroresize.__file__)", cwd=folders["empty"]).strip()
        if not place.startswith(str(folder)):
            sys.exit(f"not the wheel was tried, but {place}")
        try_commands(python, folders["empty"])
        if is_release:
            check_version(wheel.name.split("-")[1])
            try_fresh(wheel, folder)
        print(f"{wheel.name} and {sdist.name} are whole, and the wheel's commands run by themselves")


if __name__ == "__main__":
    main()
