"""Models whose work changes while they are trained: one file for each case.

A case is a :class:`~lm_examples.cases.dynamic_case.DynamicCase`; the frozen dataclass that its ``Options`` names holds
what a configuration may say of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm_examples.cases.dynamic_case import DynamicCase

#: By the name in a configuration: the module and the class, imported when it is asked for.
CASES = {
    "none": ("dynamic_case", "DynamicCase"),
    "pruning": ("pruning", "Pruning"),
    "freezing": ("freezing", "Freezing"),
    "early_exit": ("early_exit", "EarlyExit"),
    "mixture_of_depths": ("mixture_of_depths", "MixtureOfDepths"),
    "mixture_of_experts": ("mixture_of_experts", "MixtureOfExperts"),
    "sparse_attention": ("sparse_attention", "SparseAttention"),
}


def case_class(name: str) -> type[DynamicCase]:
    """The class of a case.

    Raises:
        KeyError: for a name that :data:`CASES` lacks.
    """
    module, kind = CASES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)
