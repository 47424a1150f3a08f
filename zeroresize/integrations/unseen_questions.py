"""Questions in a forward's code whose answers tracing cannot vary: what kind an object is, or who is looking.

A proxy stands for a tensor in operations. What is compared by ``is`` or matched is the proxy itself, so that the other
branch would never be seen.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterable
from functools import lru_cache

_MATCHES = ("MATCH_CLASS", "MATCH_MAPPING", "MATCH_SEQUENCE", "MATCH_KEYS")
_COMPARES = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
_SINGLETONS = ("None", "True", "False", "Ellipsis")
#: Functions that answer otherwise while a forward is traced, compiled or exported, or in another mode.
_WORDS = """
    is_anomaly_enabled is_compiling is_dynamo_compiling is_exporting is_fx_symbolic_tracing is_fx_tracing
    is_inference_mode_enabled is_scripting is_torchdynamo_compiling is_tracing
"""
_OF_MODES = frozenset(_WORDS.split())


def unseen_question(codes: Iterable[types.CodeType]) -> str | None:
    """Return the first question in code that ran which tracing cannot vary, and where; None if there is none."""
    for code in tuple(codes):
        asked = _asked_in(code)
        if asked is not None:
            return f"{asked} (in {code.co_name}, {code.co_filename}:{code.co_firstlineno}), which tracing cannot vary"
    return None


def compares_arguments(codes: Iterable[types.CodeType]) -> bool:
    """Tell whether code that ran asks whether something is True or False itself."""
    return any(_is_asked_of(code, ("True", "False")) for code in tuple(codes))


@lru_cache(maxsize=1024)
def _asked_in(code: types.CodeType) -> str | None:
    modes = sorted(_OF_MODES.intersection(code.co_names))
    if modes:
        return f"it asks {modes[0]}()"
    instructions = list(dis.get_instructions(code))
    names = {one.opname for one in instructions}
    if not names.isdisjoint(_MATCHES):
        return "it matches patterns"
    if not names.isdisjoint(_COMPARES) and any(
        instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type"
        for instruction in instructions
    ):
        return "it compares types"
    if "IS_OP" in names and not _is_asked_of(code, _SINGLETONS, all_of_them=True):
        return "it compares objects by `is`"
    return None


@lru_cache(maxsize=1024)
def _is_asked_of(code: types.CodeType, constants: tuple[str, ...], *, all_of_them: bool = False) -> bool:
    """Whether some, or all, comparisons by ``is`` are with one of these constants, on the right."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    answers = [
        before.opname == "LOAD_CONST" and repr(before.argval) in constants
        for before, instruction in itertools.pairwise(instructions)
        if instruction.opname == "IS_OP"
    ]
    return all(answers) if all_of_them else any(answers)
