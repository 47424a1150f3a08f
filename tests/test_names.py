"""Names say what they hold: outside of a comprehension on one line nothing is called one, own, found or told."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("zeroresize", "vit_examples", "lm_examples", "scripts", "tests")
SHORT = {ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda}
#: Nodes that give no name, though there are many of them.
NAMELESS = {ast.Load, ast.Store, ast.Constant, ast.Call, ast.Expr, ast.keyword, ast.Tuple, ast.Subscript, ast.BinOp}
EMPTY_NAMES = {"one", "own", "found", "told"}


def names_given(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node gives to something: a variable, parameter, attribute, function or class."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield name


def nodes_that_count(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all within it, but nothing of comprehensions and lambdas on one line."""
    nodes = [tree]
    for node in nodes:
        if type(node) not in SHORT or node.lineno != node.end_lineno:
            yield node
            nodes += ast.iter_child_nodes(node)


def empty_names(source: str) -> list[tuple[int, str]]:
    """Return the line and the name of everything in a Python source that is called by an empty name."""
    return [
        (node.lineno, name)
        for node in nodes_that_count(ast.parse(source))
        if type(node) not in NAMELESS
        for name in names_given(node)
        if name.strip("_") in EMPTY_NAMES
    ]


def test_names_say_what_they_hold():
    paths = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [
        f"{name}:{line} {word}"
        for name, path in sorted(paths.items())
        for line, word in empty_names(path.read_text(encoding="utf-8"))
    ] == []
