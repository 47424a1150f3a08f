"""Feed-forward blocks of split layers, and their training as they are and in compiled graphs."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import zeroresize as zr

WIDTH, HIDDEN = 6, 24


class FeedForward(nn.Module):
    def __init__(self, group):
        super().__init__()
        gate, up, down = (nn.Linear(*sizes).double() for sizes in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        self.gate = zr.ColumnParallelLinear.from_linear(gate, process_group=group)
        self.up = zr.ColumnParallelLinear.from_linear(up, process_group=group)
        self.down = zr.RowParallelLinear.from_linear(down, process_group=group)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def feed_forwards(group):
    torch.manual_seed(0)
    return nn.Sequential(FeedForward(group), FeedForward(group))


def batch(num_tokens=5, width=WIDTH):
    return torch.randn(2, num_tokens, width, generator=torch.Generator().manual_seed(1)).double()


def compiled(model, backend="aot_eager", fullgraph=True):
    """A model in one graph, and what counts how often it was compiled."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=fullgraph), counter


def assert_same_training(computed, expected, backend="aot_eager"):
    """Losses and weights bit for bit; by a backend that computes otherwise, nearly."""
    (losses, weights), (expected_losses, expected_weights) = computed, expected
    if backend == "aot_eager":
        assert losses == expected_losses
        assert all(torch.equal(*pair) for pair in zip(weights, expected_weights, strict=True))
    else:
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        assert all(torch.allclose(*pair, rtol=1e-10) for pair in zip(weights, expected_weights, strict=True))


def weights_of(model):
    return [weight.detach() for weight in model.parameters()]


def train(call, model, num_steps, x, after=lambda step: None, optimizer=None):
    """The losses of some steps, and last the parameters' sums."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
        losses.append(loss.item())
    return losses
