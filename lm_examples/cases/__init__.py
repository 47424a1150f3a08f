"""Models whose work changes while they are trained: one file for each case.

A case is a :class:`~lm_examples.cases.dynamic_case.DynamicCase` that is made of the model's shape and its options, a
frozen dataclass that its class attribute ``Options`` names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_examples.cases.dynamic_case import DynamicCase
    from lm_examples.gpt import ModelConfig

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
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)  # type: ignore[no-any-return]


def options_class(name: str) -> type[Any] | None:
    """The dataclass of a case's options; None where it has none."""
    return getattr(case_class(name), "Options", None)


def make_case(name: str, model: ModelConfig, options: Any = None) -> DynamicCase:
    """A case for a model of this shape.

    Raises:
        ValueError: if the options do not fit the model.
    """
    kind: Any = case_class(name)
    return kind(model) if options is None else kind(model, options)
