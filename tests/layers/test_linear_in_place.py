"""What may be done in place to a layer's output: what the unsharded ``nn.Linear`` allows, whatever plan is in force."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import LAYERS, Comparison, equal_loans, lend, mask, plan_keeping, randn, shard_of
from torch import nn

from zeroresize.config.keys import MIGRATION_TRANSPORTS

pytestmark = pytest.mark.slow

IN, OUT = 12, 24  # a rank's slice of y has an even number of features

STATES = ["no plan", "plan", *MIGRATION_TRANSPORTS]

LEADING = [(7,), (4, 5), (2, 3, 5), (), (1,), (0,), (0, 5)]


def add(y):
    y += 1.0
    return y


def rotate(y):
    y[..., ::2].mul_(0.5)
    y[..., 1::2] -= y[..., ::2]
    return y


IN_PLACE = {
    "relu_": torch.relu_,
    "+=": add,
    "what a view becomes": lambda y: y.view(-1).mul_(2.0).view(y.shape),
    "rotation": rotate,
    "after it was saved": lambda y: y.square() + add(y),  # an error in backward
}


class InState(Comparison):
    """A layer in one of the ``STATES`` beside the unsharded one that gives what the layer should.

    Under a plan that is one whose weight is zero in the columns that rank 1 prunes, and learns nothing there.
    """

    def __init__(self, kind, group, state, bias=True, **options):
        torch.manual_seed(0)
        super().__init__(kind, nn.Linear(IN, OUT, bias=bias, dtype=torch.float64), group, **options)
        if state == "plan":
            self._prune(range(1, self.layer.num_columns))
        elif state in MIGRATION_TRANSPORTS:
            lend({"layer": self.layer}, group, equal_loans({1: 0.5}, dist.get_world_size(group)), state)

    def _prune(self, keep):
        num_columns, num_ranks = self.layer.num_columns, dist.get_world_size(self.group)
        masks = [mask(keep if rank == 1 else range(num_columns), num_columns) for rank in range(num_ranks)]
        by_rows = [kept_K.expand(OUT // num_ranks, -1) for kept_K in masks]
        kept_NK = torch.cat(by_rows) if self.kind == "column" else torch.cat(masks)
        with torch.no_grad():
            self.linear.weight *= kept_NK
        self.linear.weight.register_hook(lambda grad: grad * kept_NK)
        if dist.get_rank(self.group) == 1:
            self.layer.plan = plan_keeping(keep, num_columns)

    def outcome(self, leading, operation):
        """Errors of the unsharded layer and of this one, in whichever pass; None for none."""
        for tensors in (self.linear, self.layer):
            tensors.zero_grad()
        self.forward(*leading)
        errors = []
        for name in ("y", "own_y"):
            try:
                setattr(self, name, operation(getattr(self, name)))
                getattr(self, name).square().sum().backward()
                errors.append(None)
            except RuntimeError as error:
                errors.append(str(error))
        return errors


def num_ranks(state):
    return 3 if state in MIGRATION_TRANSPORTS else 2


each_layer_in_each_state = pytest.mark.parametrize(
    ("kind", "options", "state"),
    [
        pytest.param(kind, options, state, id=f"{name}, {state}")
        for name, (kind, options) in LAYERS.items()
        for state in STATES
        if not (
            options.get("gather_output") and state in MIGRATION_TRANSPORTS
        )  # such layers are left alone by balancing
    ],
)


@pytest.mark.few(10)
@each_layer_in_each_state
def test_a_layers_output_may_be_modified_like_the_unsharded_layers(run_ranks, kind, options, state):
    def check(rank, group):
        compared = InState(kind, group, state, **options)
        for leading in LEADING:
            for name, operation in IN_PLACE.items():
                expected, actual = compared.outcome(leading, operation)
                assert (actual is None) == (expected is None), (leading, name, expected, actual)
                if expected is None:
                    compared.assert_close()

    run_ranks(check, num_ranks(state))


@pytest.mark.few(6)
@each_layer_in_each_state
def test_jagged_tensors_are_treated_as_by_the_unsharded_layer(run_ranks, kind, options, state):
    def jagged(compared, is_split):
        sequences = [randn(length, IN, seed=length, dtype=torch.float64) for length in (3, 1, 5)]
        if is_split:
            sequences = [shard_of(one, -1, compared.group).contiguous() for one in sequences]
        return torch.nested.nested_tensor(sequences, layout=torch.jagged).requires_grad_()

    def check(rank, group):
        compared = InState(kind, group, state, **options)
        for operation in (torch.relu_, add, lambda y: y.mul_(2.0)):
            compared.linear.zero_grad()
            compared.layer.zero_grad()
            x, own_x = jagged(compared, False), jagged(compared, compared.splits_x)
            y, own_y = operation(compared.linear(x)), operation(compared.layer(own_x))
            assert own_y.shape[:2] == own_x.shape[:2]  # of the same sequences, so that they can be added
            (y.values().square().sum() + own_y.values().square().sum()).backward()
            compared.y, compared.own_y = y.values(), own_y.values()
            compared.x, compared.own_x = (
                SimpleNamespace(grad=x.grad.values()),
                SimpleNamespace(grad=own_x.grad.values()),
            )
            compared.assert_close()

    run_ranks(check, num_ranks(state))


@on_ranks(2)
def test_a_nested_tensor_of_another_layout_is_an_error(rank, group):
    x = torch.nested.nested_tensor([torch.ones(3, IN), torch.ones(2, IN)], layout=torch.strided)
    for kind in ("column", "row"):
        with pytest.raises(ValueError, match=r"layout torch.strided: allowed are plain ones and torch.jagged"):
            InState(kind, group, "no plan").layer(x)
