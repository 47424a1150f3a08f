"""Which faults can be planted in a file, which of them are, by a seed, and the source with one of them in it."""

from __future__ import annotations

import ast
import collections
import random
from collections.abc import Iterator
from pathlib import Path

FIELDS = ("file", "line", "column", "function", "text", "fault")

_OPPOSITES: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


def faults_of(path: Path) -> Iterator[tuple[dict[str, str], ast.AST, ast.AST]]:
    """Each fault that a file can be given: its description, the node it changes, and what stands there then."""
    source = path.read_text()
    lines = source.splitlines()
    for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        for statement in _statements(function):
            for node, changed, fault in _changes(statement):
                place = {"file": str(path), "line": str(node.lineno), "column": str(node.col_offset)}
                text = lines[node.lineno - 1].strip()
                yield {**place, "function": function.name, "text": text, "fault": fault}, node, changed


def _statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """Those of a function, also in its blocks, without docstrings, other functions and what is said in errors."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise)):
            continue
        if isinstance(node, ast.stmt) and not _is_text(node):
            yield node
        left.extend(ast.iter_child_nodes(node))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """All expressions of a statement, without those of the statements in its blocks and of annotations and texts."""
    left = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
    if isinstance(statement, ast.AnnAssign):
        left.remove(statement.annotation)
    while left:
        node = left.pop(0)
        if not isinstance(node, (ast.JoinedStr, ast.Lambda)):
            yield node
            left.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.expr, ast.keyword)))


def _changes(statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)):
        yield statement, ast.Pass(), "statement removed"
    if isinstance(statement, (ast.If, ast.While)):
        yield statement.test, ast.UnaryOp(ast.Not(), statement.test), "condition negated"
    for node in _expressions(statement):
        if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _OPPOSITES:
            opposite = _OPPOSITES[type(node.op)]
            yield node, _with(node, op=opposite()), f"{type(node.op).__name__} is {opposite.__name__}"
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITES:
            opposite = _OPPOSITES[type(node.ops[0])]
            changed = _with(node, ops=[opposite(), *node.ops[1:]])
            yield node, changed, f"{type(node.ops[0]).__name__} is {opposite.__name__}"
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            for change in (1, -1):
                yield node, ast.Constant(node.value + change), f"{node.value} is {node.value + change}"
        plain = isinstance(node, ast.Call) and not any(isinstance(arg, ast.Starred) for arg in node.args)
        if plain and len(node.args) >= 2 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
            changed = _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
            yield node, changed, "first two arguments swapped"


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def chosen_faults(roots: list[str], number: int, seed: int) -> list[dict[str, str]]:
    """So many faults, each on a line of its own, by chance, yet the same for the same seed and package."""
    by_line: dict[tuple[str, str], list[dict[str, str]]] = collections.defaultdict(list)
    for path in sorted(path for root in roots for path in Path(root).rglob("*.py")):
        for fault, _, _ in faults_of(path):
            by_line[fault["file"], fault["line"]].append(fault)
    chance = random.Random(seed)
    places = chance.sample(sorted(by_line, key=lambda place: (place[0], int(place[1]))), min(number, len(by_line)))
    return [chance.choice(by_line[place]) for place in sorted(places, key=lambda place: (place[0], int(place[1])))]


def planted(fault: dict[str, str]) -> str:
    """The source of the fault's file with the fault in it.

    Raises:
        ValueError: if the package has changed since the faults were listed.
    """
    path = Path(fault["file"])
    for candidate, node, changed in faults_of(path):
        if candidate == fault:
            lines = path.read_bytes().splitlines(keepends=True)
            first, last = node.lineno - 1, node.end_lineno - 1
            text = ast.unparse(changed) if isinstance(changed, ast.stmt) else f"({ast.unparse(changed)})"
            lines[first : last + 1] = [
                lines[first][: node.col_offset] + text.encode() + lines[last][node.end_col_offset :]
            ]
            return b"".join(lines).decode()
    raise ValueError(f"{fault['file']}:{fault['line']}: {fault['text']!r} is not there: list the faults again")
