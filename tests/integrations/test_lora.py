"""LoRA of PEFT: units of layers that it has wrapped stay where its matrices are, before convert and after it."""

import pytest
import torch
from helpers.dtensor_models import batch, mesh_of, whole_model
from helpers.processes import caught_log_lines, for_each
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.local_parts import local_of

peft = pytest.importorskip("peft")
STAYS_BEHIND = "it is in a peft.tuners.lora.layer.Linear, whose matrices of the layer's units would stay behind"
#: In the first block only: units of the second one move.
TARGETS = {"column": r"blocks\.0\.mlp\.up", "row": r"blocks\.0\.mlp\.down"}


def feed_forward_only():
    model = whole_model()
    for block in model.blocks:
        block.attention = torch.nn.Identity()
    return model


def with_lora(model, target):
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=target, init_lora_weights=False))
    for parameter in wrapped.base_model.model.blocks[1].mlp.parameters():
        parameter.requires_grad_(True)
    return wrapped


def divide(model, mesh, *, lora_only=False):
    """Divide feed-forward layers by torch's styles, and of LoRA's matrices those that hold units."""
    for number, block in enumerate(model.blocks):
        plan = {}
        for name, style in (("gate", ColwiseParallel), ("up", ColwiseParallel), ("down", RowwiseParallel)):
            layer = getattr(block.mlp, name)
            if hasattr(layer, "base_layer"):
                side = "lora_A" if style is RowwiseParallel else "lora_B"
                plan[f"{name}.{side}.default"] = style()
                name = f"{name}.base_layer"
            if not lora_only:
                plan[name] = style()
        if plan:
            parallelize_module(block.mlp, mesh, plan)
        assert plan or number


def train(model, optimizer, num_steps, after=lambda step: None):
    losses = []
    for step in range(num_steps):
        loss = functional.cross_entropy(model(batch(step)).flatten(0, 1), batch(step + 100).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
        losses.append(loss.item())
    return losses


def optimizer_of(model):
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def expected_of(num_steps):
    wholes = {target: with_lora(feed_forward_only(), TARGETS[target]) for target in TARGETS}
    return {target: train(whole, optimizer_of(whole), num_steps) for target, whole in wholes.items()}


def test_wrapped_before_convert_its_units_stay_by_name_and_others_move(run_ranks):
    expected = expected_of(5)

    @for_each([(target,) for target in TARGETS])
    def check(rank, group, target):
        model = with_lora(feed_forward_only(), TARGETS[target])
        inner = model.base_model.model
        divide(inner, mesh_of())
        zr.convert(model)
        reasons = {name: layer.stays_even for name, layer in balanced_layers(model).items()}
        inside = {name: why for name, why in reasons.items() if ".blocks.0." in name}
        wrapped = {name: why for name, why in inside.items() if "base_layer" in name or "lora" in name}
        assert len(inside) == 4 and all(inside.values()) and {*wrapped.values()} == {STAYS_BEHIND}
        assert {why for name, why in reasons.items() if ".blocks.1." in name} == {None}

        optimizer = optimizer_of(model)
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))

        def after(step):
            balancer.step()
            if step == 1:
                balancer.move((3, 1))

        assert train(model, optimizer, 5, after) == pytest.approx(expected[target], abs=1e-10)
        assert len(local_of(inner.blocks[1].mlp.up.weight)) == (36, 12)[rank]
        if target == "column":
            wrapped = inner.blocks[0].mlp.up
            assert len(local_of(wrapped.base_layer.weight)) == len(local_of(wrapped.lora_B.default.weight)) == 24

    run_ranks(check, 2)


def test_wrapped_after_convert_nothing_moves_and_the_error_says_what_was_done(run_ranks):
    expected = expected_of(4)

    @for_each([(target,) for target in TARGETS])
    def check(rank, group, target):
        model, mesh = feed_forward_only(), mesh_of()
        divide(model, mesh)
        zr.convert(model)
        wrapped = with_lora(model, TARGETS[target])
        divide(model, mesh, lora_only=True)
        optimizer = optimizer_of(wrapped)
        balancer = zr.Balancer(wrapped, optimizer, zr.BalanceConfig(mode="exact"))

        def after(step):
            balancer.step()
            if step == 1:
                with pytest.raises(RuntimeError, match=r"is in a peft\.tuners\.lora\.layer\.Linear"):
                    balancer.move((3, 1))

        with caught_log_lines():
            assert train(wrapped, optimizer, 4, after) == pytest.approx(expected[target], abs=1e-10)
        assert len(local_of(model.blocks[1].mlp.up.weight)) == 24

    run_ranks(check, 2)
