"""How many multiplications a dense block does, against which a block's ``work`` is counted.

``T`` tokens of one sequence. Norms, GELU and softmax do not count.
"""

from __future__ import annotations

from lm_examples.gpt import ModelConfig


def projection_products(model: ModelConfig) -> int:
    """Of the linear layers of attention, for one token."""
    return 4 * model.hidden_size**2


def feed_forward_products(model: ModelConfig) -> int:
    """Of the feed-forward part, for one token."""
    return 2 * model.hidden_size * model.feed_forward_size


def attention_products(model: ModelConfig, num_pairs: int) -> int:
    """Of attention itself: scores and mixed values of so many pairs of a query and a key, in all heads."""
    return 2 * model.hidden_size * num_pairs


def dense_products(model: ModelConfig, num_tokens: int) -> int:
    """Of a dense block, for one sequence of ``num_tokens``; each attends to itself and those before."""
    of_linear = num_tokens * (projection_products(model) + feed_forward_products(model))
    return of_linear + attention_products(model, num_tokens * (num_tokens + 1) // 2)
