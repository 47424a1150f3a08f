"""Names say what they hold: outside of a comprehension on one line nothing is called one, own, found or told."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("zeroresize", "vit_examples", "lm_examples", "scripts", "tests")
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


def nodes_that_count(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all within it, but nothing of comprehensions and lambdas on one line."""
    is_short = isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda)
    if is_short and node.lineno == node.end_lineno:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes_that_count(child)


def empty_names(source: str) -> list[tuple[int, str]]:
    """Return the line and the name of everything in a Python source that is called by an empty name."""
    return [
        (node.lineno, name)
        for node in nodes_that_count(ast.parse(source))
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


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("one = 1", "one"),
        ("own: int = 1", "own"),
        ("for _found, x in y: pass", "_found"),
        ("self._told = 1", "_told"),
        ("def own(): pass", "own"),
        ("def f(*, told=None): pass", "told"),
        ("from x import y as one", "one"),
        ("try: pass\nexcept E as told: pass", "told"),
        ("with x as found: pass", "found"),
        ("[one\n for one in x]", "one"),
        ("match x:\n case [*found]: pass", "found"),
    ],
)
def test_an_empty_name_is_seen(source, name):
    assert [word for _, word in empty_names(source)] == [name]


@pytest.mark.parametrize("source", ["[one for one in x]", "f(lambda own: own)", "x.found", "one_of = owner = 1"])
def test_other_names_are_let_be(source):
    assert empty_names(source) == []
