"""Heads of transformers' models that ranks divide by tokens: exact, and only where attention is torch's function."""

import pytest
import torch
from helpers.hosts import KINDS, VOCABULARY, build, last_hidden_state, split
from helpers.on_ranks import on_ranks
from helpers.segments import convert_and_find
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import all_segments

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.same_ranks,
    pytest.mark.usefixtures("copies_are_cheap", "any_gain_is_enough"),
]


def loss_of(kind, model, *, is_padded):
    if not is_padded:
        return last_hidden_state(kind, model).square().mean()
    words = torch.randint(VOCABULARY - 1, (3, 7), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(7) >= torch.tensor([[0], [2], [4]])).long()
    hidden = model(input_ids=words, attention_mask=mask, use_cache=False)[0]
    return hidden[mask.bool()].square().mean()


def train(kind, model, steps, clip, after_step=lambda: None):
    optimizer = model.optimizer
    values = []
    for step in steps:
        loss = loss_of(kind, model, is_padded=step % 2 == 1 and not KINDS[kind][1])
        loss.backward()
        values += [loss.item(), clip(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return values


@pytest.mark.slow
@on_ranks(2, [(kind,) for kind in ("Llama", "Mistral", "ViT")])
def test_models_train_as_the_undivided_ones(rank, group, kind):
    whole, model = build(kind), split(build(kind), group)
    zr.convert(model, process_group=group)
    for each in (whole, model):
        each.optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, model.optimizer, zr.BalanceConfig(mode="off"), process_group=group)
    heads = next(each for each in all_segments(balanced_layers(model)) if each.kind == "heads")
    values = train(kind, model, range(1), zr.clip_grad_norm_, balancer.step)
    for first, shares in ((1, (1.4, 2.6)), (3, (2.5, 1.5))):
        balancer.move(shares)
        assert len(heads.owned.apart_by(heads.owned.slices))
        values += train(kind, model, range(first, first + 2), zr.clip_grad_norm_, balancer.step)
    assert values == pytest.approx(train(kind, whole, range(5), clip_grad_norm_), rel=1e-9)


@on_ranks(2)
def test_heads_stay_whole_where_attention_is_not_torchs_or_takes_tokens_elsewhere(rank, group):
    from transformers.models.llama import modeling_llama

    def backwards(module, *operands, **options):
        flipped = [each.flip(0) if each is not None and each.ndim == 4 else each for each in operands]
        attended, weights = of_sdpa(module, *flipped, **options)
        return attended.flip(0), weights

    functions = modeling_llama.ALL_ATTENTION_FUNCTIONS
    of_sdpa = functions["sdpa"]
    for attention, function, slices in (("sdpa", of_sdpa, 16), ("eager", of_sdpa, 1), ("sdpa", backwards, 1)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(functions, "sdpa", function)
            segments, reasons = convert_and_find(split(build("Llama", attention), group), group)
        there_are = {each.owned.slices for each in segments if each.kind == "heads"}
        assert there_are == {slices}, reasons


@on_ranks(2)
def test_a_trial_moves_parts_of_heads(rank, group):
    model = zr.convert(split(build("Llama"), group), process_group=group)
    words = torch.randint(VOCABULARY - 1, (3, 7), generator=torch.Generator().manual_seed(2))
    for each in zr.check_segments(model, {"input_ids": words, "use_cache": False}):
        assert each.problem is None and each.output_difference < 1e-12 and each.gradient_difference < 1e-12
