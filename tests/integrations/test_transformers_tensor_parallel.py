"""Models that transformers has split by its tensor-parallel plans, or torch's styles: moved, saved, reloaded."""

import functools

import pytest
import torch
from helpers.transformers_models import (
    DECODERS,
    FAMILIES,
    IS_5,
    batch,
    split_by_plan,
    train,
    whole_decoder,
    with_eager_experts,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segments import all_segments

pytestmark = pytest.mark.transformers
SHARES = {0: (3, 1), 2: (1, 3), 4: (1, 1)}
#: Where a norm of all heads lies between, whose gradient version 4.51 sums over none, and version 5 once a backward.
NORMS_OF_HEADS = ("qwen3", "gemma3", "qwen3_moe", "qwen3_next")
#: What moves where that is not heads and neurons.
MOVES = {
    "glm4": ["heads"],
    "olmo2": ["neurons"],
    "deepseek_v3": ["neurons"],
} | ({} if IS_5 else {"mixtral": ["heads"], **{kind: ["neurons"] for kind in NORMS_OF_HEADS}})
#: Whose experts' neurons move, too.
EXPERTS = ("mixtral", "qwen3_moe", "qwen3_next", "llama4", "deepseek_v3") if IS_5 else ()


def kinds_of_units(model):
    return sorted({segment.kind for segment in all_segments(balanced_layers(model))})


def shapes_of(model):
    return [tuple(local_of(one).shape) for one in model.parameters()]


def trained_with_moves(model, micro_batches=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
    changes = []

    def after(step):
        balancer.step()
        if step in SHARES:
            before = shapes_of(model)
            balancer.move(SHARES[step])
            changes.append(shapes_of(model) != before)

    values = train(model, optimizer, 6, zr.clip_grad_norm_, after=after, micro_batches=micro_batches)
    assert changes == [True, True, True]
    return values, balancer, optimizer


def held(model, optimizer):
    """Copies of what this rank holds of weights and moments."""
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return [local_of(each).detach().clone() for each in (*model.parameters(), *moments)]


def kept_in_float64(cast):
    """As ``cast``, but for what would be rounded."""

    def call(x, *to, **options):
        return x if x.dtype == torch.float64 and to == (torch.float32,) else cast(x, *to, **options)

    return call


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [kind for kind in (*DECODERS, *FAMILIES) if kind not in ("phi3", "gpt_oss")])
def test_a_decoder_that_was_split_when_loaded_trains_as_whole_and_is_saved_whole(
    run_ranks, tmp_path, monkeypatch, kind
):
    # Norms, rotations and losses of some decoders are of float32 whatever they are given, and rounding grows.
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    if kind == "deepseek_v3":  # whose router casts otherwise, and chooses experts by what it has rounded
        for name in ("type", "to"):
            monkeypatch.setattr(torch.Tensor, name, kept_in_float64(getattr(torch.Tensor, name)))
    attention = (DECODERS | FAMILIES)[kind][1].get("attn_implementation", "sdpa")
    whole_decoder(kind).save_pretrained(tmp_path / "whole")
    load = functools.partial(type(whole_decoder(kind)).from_pretrained, attn_implementation=attention)
    load = functools.partial(load, **{"dtype" if IS_5 else "torch_dtype": torch.float64})
    # As it is divided: some keep factors in the dtype they load in; a router is loaded in float32 whatever is wanted.
    of_float64 = (lambda model: model.double()) if kind == "deepseek_v3" else (lambda model: model)
    whole = of_float64(with_eager_experts(load(tmp_path / "whole")))
    micro_batches = 1 if kind in NORMS_OF_HEADS else 2
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = train(whole, optimizer, 6, clip_grad_norm_, micro_batches=micro_batches)
    is_right = IS_5 or kind not in NORMS_OF_HEADS  # else the ranks' norms go ways of their own, without us, too

    def check(rank, group):
        folder = tmp_path / "whole"
        loaded = (split_by_plan(folder, rank, attn_implementation=attention) for _ in range(2))
        host, model = map(of_float64, loaded)
        zr.convert(model)
        with torch.no_grad():
            assert model(**batch(7)).loss.item() == pytest.approx(host(**batch(7)).loss.item(), abs=1e-12)
        assert kinds_of_units(model) == MOVES.get(kind, ["heads", "neurons"])
        names = {segment.name.rpartition(".")[2] for segment in all_segments(balanced_layers(model))}
        assert ("experts" in names) == (kind in EXPERTS)
        values, balancer, optimizer = trained_with_moves(model, micro_batches)
        if is_right:
            assert values == pytest.approx(expected, abs=1e-9)
        at_home = held(model, optimizer)
        balancer.move((3, 1))
        with pytest.raises(RuntimeError, match=r"at_home\(\)"):
            model.save_pretrained(tmp_path / "uneven")
        with balancer.at_home():
            assert all(map(torch.equal, held(model, optimizer), at_home))
            model.save_pretrained(tmp_path / "trained")
        balancer.close(at_home=True)
        with torch.no_grad():
            return model(**batch(7)).loss.item()

    loss, _ = run_ranks(check, 2)
    reloaded = of_float64(with_eager_experts(load(tmp_path / "trained")))
    with torch.no_grad():
        assert reloaded(**batch(7)).loss.item() == pytest.approx(loss, abs=1e-9 if is_right else 1e-2)
    for name, value in whole.state_dict().items() if is_right else ():
        rounding = 1e-7 if kind == "deepseek_v3" and name.endswith("mlp.gate.weight") else 0.0  # it loads in float32
        torch.testing.assert_close(reloaded.state_dict()[name], value, atol=1e-9, rtol=rounding)


@pytest.mark.parametrize("kind", sorted({"phi3", "gpt_oss"} & set(FAMILIES)))
def test_a_plan_that_splits_nothing_or_gathers_is_said_to(run_ranks, tmp_path, kind):
    whole_decoder(kind).save_pretrained(tmp_path / "whole")

    def check(rank, group):
        model = split_by_plan(tmp_path / "whole", rank)
        if kind == "gpt_oss":
            with pytest.raises(ValueError, match="the model has no layer that can be balanced"):
                zr.convert(model)
            return
        zr.convert(model)
        assert kinds_of_units(model) == []
        reasons = {layer.stays_even for layer in balanced_layers(model).values()}
        assert reasons == {"it takes the whole input and splits it evenly itself"}

    run_ranks(check, 2)


def test_gpt2_cannot_be_split_by_torch_and_is_told_so(run_ranks):
    """Its layers are no nn.Linear; Colossal-AI's ShardFormer splits them."""
    import transformers

    def check(rank, group):
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=64)
        model = transformers.GPT2LMHeadModel(config)
        mesh = init_device_mesh("cpu", (2,))
        from torch.distributed.tensor.parallel import parallelize_module

        with pytest.raises(ValueError, match=r"needs a whole torch\.nn.Linear, found a Conv1D"):
            parallelize_module(model, mesh, {"transformer.h.0.mlp.c_fc": zr.ColwiseParallel()})
        with pytest.raises(ValueError, match="the model has no layer that can be balanced"):
            zr.convert(model, group)

    run_ranks(check, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("neurons", "kv_heads"), [(52, 3), (51, 3), (52, 1)])
def test_heads_and_neurons_that_ranks_do_not_divide_are_held_whole(run_ranks, tmp_path, monkeypatch, neurons, kv_heads):
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": kv_heads, "intermediate_size": neurons}
    monkeypatch.setitem(DECODERS, "llama", ("Llama", {**DECODERS["llama"][1], **sizes}))
    whole = whole_decoder("llama")
    whole.save_pretrained(tmp_path / "whole")
    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 6, clip_grad_norm_)

    def check(rank, group):
        model = split_by_plan(tmp_path / "whole", rank)
        parameters = list(model.parameters())
        if neurons == 51 and not IS_5:
            with pytest.raises(ValueError, match=r"gate_proj is a layer of shape \(51, 24\), .* hold \(50, 24\)"):
                zr.convert(model)
            return
        zr.convert(model)
        assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
        attention, feed_forward = model.model.layers[1].self_attn, model.model.layers[1].mlp
        assert local_of(attention.k_proj.weight).shape == (8 if rank == 0 and kv_heads == 3 else 4, 24)
        assert local_of(feed_forward.up_proj.weight).shape[0] == neurons // 2 + (rank == 0) * neurons % 2
        values, balancer, _ = trained_with_moves(model)
        assert values == pytest.approx(expected, abs=1e-9)
        with pytest.raises(RuntimeError, match="unit_size"):
            model.model.layers[0].self_attn.k_proj.weight.full_tensor()
        balancer.move((3, 1))
        state = zr.sharded_state_dict(model)
        torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "trained")

    run_ranks(check, 2)
    if neurons == 52 or IS_5:
        state = {name: torch.empty_like(value) for name, value in whole.state_dict().items()}
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "trained")
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-9, rtol=0)
