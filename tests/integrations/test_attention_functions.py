"""Attention functions that a user registers in transformers, or puts in place of its own, keep heads where they are."""

import functools
import importlib

import pytest
import torch
from helpers.hosts import DEPTH, KINDS, build, compute, split
from helpers.parallel_layers import hold, results

import zeroresize as zr
from zeroresize.convert import balanced_layers
from zeroresize.layers.segments import owned_segments
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.agreement import CannotMoveError
from zeroresize.resharding.units.moving_units import move_units

pytestmark = pytest.mark.slow

OFF = zr.BalanceConfig(mode="off")
#: Those whose attention looks its function up.
LOOKING_UP = [kind for kind in KINDS if kind not in ("Bert", "Roberta")]


def alibi(module, query, key, value, attention_mask, **options):
    """Sound as long as a rank holds these heads: each of them has another slope."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    slopes = torch.arange(1.0, query.shape[1] + 1.0, dtype=query.dtype).view(-1, 1, 1)
    distance = torch.arange(key.shape[2], dtype=query.dtype)
    return sdpa_attention_forward(module, query, key, value, -slopes * distance, **options)


@pytest.fixture
def attention_functions(monkeypatch):
    """transformers' table of them; what a test puts there is forgotten again."""
    from transformers.modeling_utils import AttentionInterface

    functions = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)
    return functions


def attention_of(model, group):
    """Segments of converted attention layers, and why they stay even, told by the log's reasons."""
    zr.convert(model, process_group=group)
    return [one for one in owned_segments(balanced_layers(model)) if one.kind != "neurons"]


def of_kinds(*kinds):
    """The others take their time, and are of one piece of code."""
    return [kind if kind == "Llama" else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.parametrize("kind", of_kinds(*LOOKING_UP))
def test_heads_stay_where_the_user_registered_a_function_of_their_own(run_ranks, attention_functions, caplog, kind):
    attention_functions["alibi"] = alibi

    def check(rank, group):
        model = split(build(kind), group)
        model.config._attn_implementation = "alibi"
        assert attention_of(model, group) == []
        assert len(owned_segments(balanced_layers(model))) == DEPTH
        assert "the attention function 'alibi' is not known to treat heads alike" in caplog.text

    caplog.set_level("DEBUG", logger="zeroresize")
    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", of_kinds("Llama", "GPT2", "ViT"))
def test_heads_stay_where_a_known_function_was_replaced(
    run_ranks, attention_functions, monkeypatch, caplog, kind, name
):
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.vit.modeling_vit

    modeling = getattr(transformers.models, kind.lower())
    modeling = getattr(modeling, f"modeling_{kind.lower()}")
    if name == "sdpa":
        attention_functions["sdpa"] = functools.wraps(attention_functions["sdpa"])(alibi)
    else:
        monkeypatch.setattr(
            modeling, "eager_attention_forward", functools.wraps(modeling.eager_attention_forward)(alibi)
        )

    def check(rank, group):
        model = split(build(kind, attention=name), group)
        assert attention_of(model, group) == []
        assert "was registered by this name" in caplog.text or "was replaced" in caplog.text

    caplog.set_level("DEBUG", logger="zeroresize")
    run_ranks(check, 2)


def test_heads_stay_where_the_forward_of_the_class_was_replaced(run_ranks, monkeypatch, caplog):
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda *inputs, **options: forward(*inputs, **options))

    def check(rank, group):
        assert attention_of(split(build("Llama"), group), group) == []
        assert "the forward of the class LlamaAttention was replaced" in caplog.text

    caplog.set_level("DEBUG", logger="zeroresize")
    run_ranks(check, 2)


def test_heads_do_not_move_any_more_once_the_function_has_changed(run_ranks, attention_functions):
    attention_functions["alibi"] = alibi

    def check(rank, group):
        model = split(build("Llama"), group)
        segments = attention_of(model, group)
        assert len(segments) == DEPTH
        num_units = len(segments[0].owned.owners)
        uneven = {segments[0].name: OwnershipMap.even(num_units, 2).with_counts([0, num_units])}
        move = functools.partial(move_units, segments, process_group=group, optimizer=None, model=model)
        home = {segments[0].name: segments[0].owned}
        move(uneven)
        model.config._attn_implementation = "alibi"
        move(home)  # which is always sound
        before = results(model, segments, compute("Llama"), group)
        if rank == 1:  # only one of them knows
            model.config._attn_implementation = "sdpa"
        with pytest.raises(ValueError if rank == 0 else CannotMoveError, match=r"'alibi'|ranks \[0\]"):
            move(uneven)
        model.config._attn_implementation = "alibi"
        assert all(one.owned.is_even for one in segments)
        after = results(model, segments, compute("Llama"), group)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    run_ranks(check, 2)


def test_moving_such_heads_would_have_computed_something_else(run_ranks, attention_functions):
    """So that the tests above test what matters."""
    attention_functions["alibi"] = alibi

    def check(rank, group):
        model = split(build("Llama", num_key_value_heads=4), group)
        segments = attention_of(model, group)
        model.config._attn_implementation = "alibi"
        before = results(model, segments, compute("Llama"), group)["y"]
        hold(segments[0], OwnershipMap.even(4, 2).with_counts([1, 3]), group)
        assert (results(model, segments, compute("Llama"), group)["y"] - before).abs().max() > 1e-4

    run_ranks(check, 2)


def weighted(real):
    def rotate(q, k, *angles, **options):
        q, k = real(q, k, *angles, **options)
        return q * torch.linspace(1, 2, q.shape[1], dtype=q.dtype).view(1, -1, 1, 1), k

    return functools.wraps(real)(rotate)


#: What a user may put in place of what attention calls: the module that holds it, its name and the implementation.
CALLED = [
    ("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb", "sdpa"),
    ("transformers.models.llama.modeling_llama", "rotate_half", "sdpa"),
    ("transformers.models.llama.modeling_llama", "repeat_kv", "eager"),
    ("transformers.integrations.sdpa_attention", "repeat_kv", "sdpa"),
    ("torch.nn.functional", "scaled_dot_product_attention", "sdpa"),
]


@pytest.mark.parametrize(("place", "name", "attention"), CALLED)
def test_heads_stay_where_what_the_forward_calls_was_replaced(run_ranks, monkeypatch, place, name, attention):
    """Before or after convert."""
    home = importlib.import_module(place)
    replaced = weighted(getattr(home, name))

    def check(rank, group):
        model = split(build("Llama", attention), group)
        segment, *_ = attention_of(model, group)
        assert segment.why_even() is None
        monkeypatch.setattr(home, name, replaced)
        reason = segment.why_even()
        assert reason is not None and name in reason and "rotate of test_attention_functions" in reason
        assert attention_of(split(build("Llama", attention), group), group) == []

    run_ranks(check, 2)


def test_the_rotation_of_liger_is_known(run_ranks, monkeypatch):
    """Only its name and file are looked at: it need not be installed."""
    from transformers.models.llama import modeling_llama

    code = "def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):\n    return q, k"
    file = {"__name__": "liger_kernel.transformers.rope"}
    exec(code, file)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", file["liger_rotary_pos_emb"])

    def check(rank, group):
        return len(attention_of(split(build("Llama"), group), group))

    assert run_ranks(check, 2) == [DEPTH] * 2


@pytest.mark.parametrize(
    ("kind", "attention", "version", "fewest"),
    [
        ("Llama", "flash_attention_2", "2.13.0", 1),
        ("Llama", "sdpa", "2.6.0", 1),
        ("Llama", "sdpa", "2.13.0+cpu", 0),
        ("Llama", "eager", "2.6.0", 0),
        ("Bert", "sdpa", "2.6.0", 1),
        ("Bert", "eager", "2.6.0", 0),
        ("GPT2", "flash_attention_2", "2.13.0", 1),
        ("ViT", "sdpa", "2.6.0", 1),
    ],
)
def test_kernels_that_divide_by_the_number_of_heads_always_have_one(
    run_ranks, monkeypatch, kind, attention, version, fewest
):
    def check(rank, group):
        model = split(build(kind, "sdpa" if attention == "flash_attention_2" else attention), group)
        model.config._attn_implementation = attention
        monkeypatch.setattr(torch, "__version__", version)
        return {one.min_units for one in attention_of(model, group)}

    assert run_ranks(check, 2) == [{fewest}] * 2


def test_heads_do_not_move_any_more_once_the_function_needs_one(run_ranks):
    def check(rank, group):
        model = split(build("Llama", "eager"), group)
        segment, *_ = attention_of(model, group)
        model.config._attn_implementation = "flash_attention_2"
        return segment.min_units, segment.why_even()

    for fewest, reason in run_ranks(check, 2):
        assert fewest == 0 and "switched after convert to one that cannot compute with no heads" in reason
