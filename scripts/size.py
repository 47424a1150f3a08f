"""How large the project is, room by room, and how many numbers it is tuned by; fails past the limits of this file.

python scripts/size.py               the table
python scripts/size.py --constants   each tuning constant, with its place
python scripts/size.py --walk        the files between a measurement and what it changes, in four small trainings
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "zeroresize"
EXAMPLES = ("scripts", "vit_examples", "lm_examples")
#: Rooms that decide and measure, whose numbers count as tuning constants.
TUNED = ("policy", "measure", "control")
#: Numbers that tune nothing.
PLAIN = (-1, 0, 1, 2)

#: What may not be passed. It falls with what is deleted, and rises only by the growth that an issue states.
LIMITS = {
    "package lines": 55_812,
    "package files": 321,
    "package code lines": 36_512,
    "tests lines": 55_458,
    "examples lines": 14_748,
    "docs lines": 4_989,
    "tuning constants": 164,
}


def files_of(folder: str, suffix: str = ".py") -> list[Path]:
    """The files in a folder of the project, of a kind."""
    return sorted(path for path in (ROOT / folder).rglob(f"*{suffix}") if "__pycache__" not in path.parts)


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def num_code_lines(path: Path) -> int:
    """Lines of a file that hold code: no blanks, comments or docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def tuning_constants(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers in a file that something is tuned by: line and literal."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value not in PLAIN:
            yield node.lineno, repr(node.value)


def room_of(path: Path) -> str:
    """The folder of the package in which a file lies; "." for the package's own files."""
    parts = path.relative_to(ROOT / PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constants", action="store_true", help="list the tuning constants")
    parser.add_argument("--walk", action="store_true", help="trace four walks through the package")
    arguments = parser.parse_args()
    if arguments.walk:
        sys.path.insert(0, str(ROOT))
        from scripts.walks import walks  # which imports the package

        for name, files in walks():
            print(f"{name}: {len(files)} files", *(f"    {file}" for file in files), sep="\n")
        return
    package = files_of(PACKAGE)
    tuned = [path for path in package if room_of(path) in TUNED]
    constants = {path: list(tuning_constants(path)) for path in tuned}
    if arguments.constants:
        for path, literals in constants.items():
            for line, literal in literals:
                print(f"{path.relative_to(ROOT)}:{line}: {literal}")
        return
    print(f"{'room':14} {'files':>6} {'lines':>7} {'code':>7}")
    rooms: dict[str, list[Path]] = {}
    for path in package:
        rooms.setdefault(room_of(path), []).append(path)
    for room, paths in sorted(rooms.items(), key=lambda item: -num_lines(item[1])):
        print(f"{room:14} {len(paths):6,} {num_lines(paths):7,} {sum(map(num_code_lines, paths)):7,}")
    sizes = {
        "package lines": num_lines(package),
        "package files": len(package),
        "package code lines": sum(map(num_code_lines, package)),
        "tests lines": num_lines(files_of("tests")),
        "examples lines": sum(num_lines(files_of(folder)) for folder in EXAMPLES),
        "docs lines": num_lines(files_of("docs", ".md")),
        "tuning constants": sum(map(len, constants.values())),
    }
    print()
    for name, limit in LIMITS.items():
        print(f"{name:20} {sizes[name]:7,} of {limit:7,}{'' if sizes[name] <= limit else '  too many'}")
    if any(sizes[name] > limit for name, limit in LIMITS.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
