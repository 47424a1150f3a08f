"""Replicated parameters whose gradients are parts of a sum, and other batches on the ranks of a group."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines, for_each
from helpers.virtual_training import FEATURES, Pair
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr

pytestmark = pytest.mark.same_ranks

SIZE = FEATURES // 4


def entered(x):
    """x, whose gradient is summed over the ranks."""
    x = x.view_as(x)
    x.register_hook(lambda grad: dist.all_reduce(grad := grad.clone()) or grad)
    return x


class Attention(nn.Module):
    """Heads of q that share one k and v, and a norm of each head of q."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.k, self.v, self.norm = nn.Linear(FEATURES, SIZE), nn.Linear(FEATURES, SIZE), nn.LayerNorm(SIZE)
        self.enter = lambda x: x

    def forward(self, x):
        whole = self.enter(x)
        q = self.norm(self.q(x).unflatten(-1, (-1, SIZE)).transpose(1, 2))
        y = nn.functional.scaled_dot_product_attention(q, self.k(whole)[:, None], self.v(whole)[:, None])
        return x + self.o(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.drop = nn.Embedding(11, FEATURES, sparse=True), nn.Dropout(drop)
        self.part, self.head = Attention(), nn.Linear(FEATURES, 11)

    def forward(self, ids, labels=None):
        return self.head(self.drop(self.part(self.embedding(ids))))


def divided(part, group, is_dtensor):
    if is_dtensor:
        mesh = DeviceMesh.from_group(group, "cpu")
        parallelize_module(part, mesh, {"q": ColwiseParallel(), "o": RowwiseParallel()})
    else:
        part.q = zr.ColumnParallelLinear.from_linear(part.q, process_group=group)
        part.o = zr.RowParallelLinear.from_linear(part.o, process_group=group)


def balanced(model, group, optimizer=None, is_dtensor=False, **config):
    if hasattr(model, "part"):
        divided(model.part, group, is_dtensor)
    zr.convert(model, process_group=group)
    optimizer = (optimizer or (lambda ones: torch.optim.SGD(ones, lr=0.1)))(model.parameters())
    return optimizer, zr.Balancer(model, optimizer, process_group=group, config=zr.BalanceConfig(mode="off", **config))


def ids_of(seed, shape=(2, 6)):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


def partial(model):
    """Parameters that have only a part of their gradients."""
    names = ("part.k.", "part.v.", "part.norm.")
    return {name: one for name, one in model.named_parameters() if name.startswith(names)}


def summed(model):
    for parameter in partial(model).values():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def trained(model, optimizer, balancer, reduce=None, dtype=None):
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = nn.functional.cross_entropy(model(ids_of(0)).flatten(0, 1), ids_of(1).flatten())
    loss.backward()
    if reduce:
        reduce(model)
    optimizer.step()
    optimizer.zero_grad()
    balancer.step()


def test_gradients_that_are_parts_of_a_sum_are_named_before_weights_change(run_ranks):
    @for_each([(False,), (True,)])
    def train(rank, group, is_dtensor):
        model = Model(drop=0.1)
        optimizer, balancer = balanced(model, group, is_dtensor=is_dtensor)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        torch.manual_seed(3)
        with pytest.raises(ValueError) as error:
            trained(model, optimizer, balancer)
        assert all(map(torch.equal, before, model.parameters()))
        balancer.close()
        trained(model, optimizer, type("", (), {"step": lambda self: None})())
        return str(error.value)

    for text in chain.from_iterable(run_ranks(train, 2, timeout_s=30)):
        assert "a part of a sum, as its layer works on what is divided over the ranks. Sum it" in text
        assert any(f"part.{name}" in text for name in ("k.weight", "v.weight", "norm.weight"))
        assert "head" not in text and "part.o" not in text


def test_what_is_summed_frozen_unused_or_skipped_is_not_blamed(run_ranks):
    """Also where a hook of the optimizer that was made after the balancer sums, in lower precision, and in closures."""

    def train(rank, group):
        def no_hook(model, optimizer):
            return summed

        def step_hook(model, optimizer):
            optimizer.register_step_pre_hook(lambda *_: summed(model))

        def tensor_hooks(model, optimizer):
            for parameter in partial(model).values():
                parameter.register_hook(lambda grad: dist.all_reduce(grad := grad.clone()) or grad)

        def frozen(model, optimizer):
            for parameter in partial(model).values():
                parameter.requires_grad_(False)
            model.unused = nn.Linear(2, 2)

        with caught_log_lines() as lines:
            for prepare, dtype in (
                (no_hook, torch.bfloat16),
                (step_hook, None),
                (tensor_hooks, torch.bfloat16),
                (frozen, None),
            ):
                model = Model()
                optimizer, balancer = balanced(model, group)
                model.part.enter = entered
                reduce = prepare(model, optimizer)
                for _ in range(2):
                    trained(model, optimizer, balancer, reduce, dtype)
                balancer.close()
        return [line for line in lines if "the ranks" in line]

    assert run_ranks(train, 2, timeout_s=60) == [[], []]


def test_other_random_draws_behind_the_layers_are_warned_of_and_other_targets_are_an_error(run_ranks):
    def train(rank, group):
        model = Model(drop=0.5)
        model.part.enter = entered
        optimizer, balancer = balanced(model, group)
        torch.manual_seed(rank)
        with caught_log_lines() as lines:
            trained(model, optimizer, balancer, summed)
        balancer.close()
        model = Model()
        model.part.enter = entered
        optimizer, balancer = balanced(model, group)
        nn.functional.cross_entropy(model(ids_of(0)).flatten(0, 1), ids_of(1 + rank).flatten()).backward()
        summed(model)
        with pytest.raises(ValueError, match="unless the targets"):
            optimizer.step()
        return [line for line in lines if "in the first optimizer step" in line]

    first, second = run_ranks(train, 2, timeout_s=30)
    assert len(first) == 1 and "drawn alike" in first[0] and not second


class Divided(nn.Module):
    """Only divided layers learn. Its inputs are floats, or ids of which each rank may have its part of the sequence."""

    def __init__(self, group):
        super().__init__()
        self.group, self.pair = group, Pair(group)
        self.pair.down.bias.requires_grad_(False)

    def forward(self, x, ids=None, labels=None):
        if ids is not None and ids.shape[1] != x.shape[1]:
            parts = [torch.empty_like(ids) for _ in range(2)]
            dist.all_gather(parts, ids, group=self.group)
            x = x + torch.cat(parts, dim=1)[..., None]
        return self.pair(x)


def test_other_batches_are_named_in_the_first_forward_on_all_ranks(run_ranks):
    """Floats but for rounding, whole numbers exactly; parts of sequences and other replicas' batches are none."""

    def train(rank, group):
        alone = [dist.new_group([each]) for each in range(2)][rank]
        x = torch.randn(2, 6, FEATURES, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(12).view(2, 6)
        cases = {  # what rank 1 is given, and what is told; "" for nothing
            "floats": ((x + 1.0,), {}, "differ in the input of pair.up; every"),
            "rounding": ((x * (1.0 + 1e-6),), {}, ""),
            "order": ((x, ids.flip(0)), {}, r"differ in input 1; every"),
            "labels": ((x, ids), {"labels": {"next": [ids + (ids == 3)]}}, "differ in input labels next 0"),
            "parts": ((x, ids[:, 3:]), {}, ""),
        }
        for name, (inputs, named, text) in cases.items():
            model = Divided(group)
            _, balancer = balanced(model, group)
            if rank == 0:
                inputs = (x, *([ids[:, :3] if name == "parts" else ids] if len(inputs) > 1 else []))
                named = {"labels": {"next": [ids]}} if named else {}
            if text:
                with pytest.raises(ValueError, match=text):
                    model(*inputs, **named)
            else:
                model(*inputs, **named)
            balancer.close()
            assert not model._forward_pre_hooks and model.pair.up.watch_start is None
        model = Divided(alone)  # of another replica
        _, balancer = balanced(model, alone)
        model(x + rank)

    run_ranks(train, 2, timeout_s=30)


def test_batches_that_differ_later_are_an_error_in_the_first_steps_and_then_warned_of(run_ranks):
    def train(rank, group):
        seen = []
        for differs_at in (0, 11):
            model = Divided(group)
            optimizer, balancer = balanced(model, group, update_every=5)
            with caught_log_lines() as lines:
                for step in range(12 if differs_at == 0 else 45):
                    for micro_batch in range(2):
                        x = torch.randn(2, 6, FEATURES, generator=torch.Generator().manual_seed(step))
                        differs = step >= differs_at and (step or micro_batch)
                        model(x + 0.1 * rank * differs).square().mean().backward()
                    try:
                        optimizer.step()
                    except ValueError as error:
                        seen.append((step, str(error)[:51]))
                        break
                    optimizer.zero_grad()
                    balancer.step()
            seen += [line for line in lines if "different batches" in line]
            balancer.close()
        return seen

    first, second = run_ranks(train, 2, timeout_s=60)
    blame = "the ranks of the group were given different batches"
    assert first[0] == second[0] == (0, blame)
    assert len(first) == 2 and first[1].startswith(f"step 20: {blame}") and len(second) == 1
