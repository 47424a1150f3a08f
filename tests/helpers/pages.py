"""The blocks of Python in README and docs, and what they name of the package."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zeroresize as zr
from zeroresize import microbatch, pipeline, strategy

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(page for page in ROOT.glob("docs/**/*.md") if "_build" not in page.parts)])
_BLOCK = re.compile(r"(?ms)^(?: *<!-- (continues|needs): ([^>]+) -->\n)?( *)```python\n(.*?)\n *```$")

#: Of which class a variable may be by its name, where a page calls its methods.
CLASSES = {
    "balancer": (
        zr.Balancer,
        zr.DataBalancer,
        pipeline.PipelineBalancer,
        strategy.StrategyBalancer,
        microbatch.MicroBatchBalancer,
    ),
    "watch": (zr.Watch,),
    "pipeline": (pipeline.Pipeline,),
}


class Block(NamedTuple):
    """``mark`` is "continues", "needs" or "", and ``what`` the text behind it."""

    page: str
    line: int
    mark: str
    what: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT)).removeprefix("docs/")
    return [
        Block(name, text.count("\n", 0, match.start(4)), match[1] or "", match[2] or "", textwrap.dedent(match[4]))
        for match in _BLOCK.finditer(text)
    ]


def faults_of(block: Block) -> Iterator[str]:
    """What does not compile, and names and keyword arguments that the package does not have."""
    tree = ast.parse(block.text)
    known: dict[str, Any] = {"zr": zr}
    for node in ast.walk(tree):
        module = getattr(node, "module", None) or ""
        if not isinstance(node, ast.ImportFrom) or not module.startswith("zeroresize"):
            continue
        for name in node.names:
            if module.startswith("zeroresize.integrations."):  # importing it would import what it integrates
                text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
                has = re.search(rf"(?m)^(class|def) {name.name}\b", text) is not None
            else:
                known[name.asname or name.name] = getattr(importlib.import_module(module), name.name, None)
                has = known[name.asname or name.name] is not None
            if not has:
                yield f"{module} has no {name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "zr" and not hasattr(zr, node.attr):
            yield f"zr has no {node.attr}"
        if isinstance(node, ast.Call):
            yield from _faults_of_call(node, known)


def _faults_of_call(call: ast.Call, known: dict[str, Any]) -> Iterator[str]:
    function, name = call.func, ast.unparse(call.func)
    if isinstance(function, ast.Name):
        candidates = [known[function.id]] if function.id in known else []
    elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner, attribute = function.value.id, function.attr
        owners = [known[owner]] if owner in known else CLASSES.get(owner, ())
        candidates = [getattr(each, attribute) for each in owners if hasattr(each, attribute)]
        if owners and not candidates and owner != "zr":
            yield f"{name} does not exist"
    else:
        candidates = []
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    if candidates and not any(given <= _keywords_of(each) for each in candidates if callable(each)):
        yield f"{name} does not take all of {sorted(given)}"


class _Any(set):
    def __ge__(self, other: object) -> bool:
        return True


def _keywords_of(function: Any) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return _Any()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return _Any()
    return {each.name for each in parameters}
