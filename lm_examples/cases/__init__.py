"""Models whose work changes while they are trained: one file for each case, with what a configuration may say of it."""

from __future__ import annotations

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.cases.early_exit import EarlyExit
from lm_examples.cases.freezing import Freezing
from lm_examples.cases.mixture_of_depths import MixtureOfDepths
from lm_examples.cases.mixture_of_experts import MixtureOfExperts
from lm_examples.cases.pruning import Pruning
from lm_examples.cases.sparse_attention import SparseAttention

#: By the name in a configuration.
CASES: dict[str, type[DynamicCase]] = {
    kind.Config.name: kind
    for kind in (DynamicCase, Pruning, Freezing, EarlyExit, MixtureOfDepths, MixtureOfExperts, SparseAttention)
}
