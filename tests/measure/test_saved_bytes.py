"""What autograd saves is counted, and hooks that were there before do what they do all the same."""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from zeroresize.measure.memory_meter import SavedBytes


def forward(model, x):
    saved = SavedBytes(model, (x,))
    y = model(x)
    saved.end()
    return y, saved


def test_each_memory_counts_once_and_parameters_do_not():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(3, 8)
    y, saved = forward(model, x)
    assert saved.total == 4 * 3 * (8 + 16 + 16)  # the input, what GELU reads, and what it gives
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_hooks_that_are_in_force_still_pack_what_is_saved():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(3, 8)
    expected = torch.autograd.grad(model(x).sum(), tuple(model.parameters()))
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.numpy(force=True).copy()  # as what moves activations elsewhere

    def unpack(array):
        unpacked.append(array.shape)
        return torch.from_numpy(array)

    with saved_tensors_hooks(pack, unpack):
        y, saved = forward(model, x)
    assert saved.total == 0 and (3, 16) in packed  # it is elsewhere
    gradients = torch.autograd.grad(y.sum(), tuple(model.parameters()))
    assert all(map(torch.allclose, gradients, expected)) and (3, 16) in unpacked
