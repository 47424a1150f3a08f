"""LoRA of PEFT: its matrices of a layer's units are divided as the layer is, and move with them."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import query_heads
from helpers.dtensor_models import HIDDEN, mesh_of, whole_model
from helpers.lora import (
    HOWS,
    adamw,
    blocks_of,
    converted,
    divided,
    heads_of,
    loss_of,
    replace_linear,
    split,
    train,
    whole_lora,
    with_lora,
)
from helpers.on_ranks import gathered, on_ranks
from helpers.transformers_models import batch as batch_of_decoder
from helpers.transformers_models import split_by_plan, whole_decoder
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segments import all_segments

peft = pytest.importorskip("peft")
load_file = pytest.importorskip("safetensors.torch").load_file
pytestmark = pytest.mark.transformers
MOVES = {0: (3, 1), 2: (1, 3), 4: (1, 1), 5: (3, 1)}


def exact(model, optimizer, **config):
    return zr.Balancer(model, optimizer, zr.BalanceConfig(**{"mode": "exact", **config}))


def moving(balancer, moves):
    def after(step):
        balancer.step()
        if step in moves:
            balancer.move(moves[step])

    return after


def states_of(model, optimizer):
    """This rank's parts of all parameters, and of what the optimizer keeps of each."""
    states = (optimizer.state.get(parameter, {}) for parameter in model.parameters())
    kept = [value for state in states for _, value in sorted(state.items())]
    return [local_of(tensor).detach().clone() for tensor in (*model.parameters(), *kept)]


def train_apart_and_save(whole, made, folder, loss=loss_of):
    """Train beside the undivided model and save it, its adapter and the optimizer while units are away."""
    optimizer = adamw(made)
    balancer = exact(made, optimizer)
    computed = train(made, optimizer, 7, zr.clip_grad_norm_, moving(balancer, MOVES), loss)
    assert computed == pytest.approx(train(whole, adamw(whole), 7, clip_grad_norm_, loss=loss), rel=1e-10)
    assert balancer.plan.owned != (1.0, 1.0)
    dcp.save(zr.sharded_state_dict(made, optimizer), checkpoint_id=folder / "away")
    with pytest.raises(RuntimeError, match=r"at_home\(\)"):
        made.save_pretrained(folder / "adapter")
    with balancer.at_home():
        made.save_pretrained(folder / "adapter")
    return balancer, optimizer


def require_saved_whole(whole, folder):
    read = {key: torch.empty_like(value) for key, value in whole.state_dict().items()}
    dcp.load(read, checkpoint_id=folder / "away", no_dist=True)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(read[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("how", HOWS)
def test_matrices_of_all_layers_move_along_and_train_as_the_undivided_model(run_ranks, tmp_path, how):
    whole = whole_lora()
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole", no_dist=True)

    def check(rank, group):
        made, beside = converted(how, group, tmp_path / "whole"), copy.deepcopy(whole)
        reasons = {name: layer.stays_even for name, layer in balanced_layers(made).items()}
        assert len(reasons) == 14 and {*reasons.values()} == {None} and not any("lora" in name for name in reasons)
        balancer, optimizer = train_apart_and_save(beside, made, tmp_path)
        require_saved_whole(beside, tmp_path)
        block = blocks_of(made)[0]
        matrices = block.mlp.up.lora_B.default, block.mlp.down.lora_A.default, block.attention.q.lora_B.default
        shapes = [tuple(local_of(matrix.weight).shape) for matrix in matrices]
        assert shapes == ([(36, 3), (3, 36), (12, 3)] if rank == 0 else [(12, 3), (3, 12), (4, 3)])

        balancer.move((1, 1))
        before = states_of(made, optimizer)
        for shares in ((3, 1), (1, 3), (1, 1)):
            balancer.move(shares)
        assert all(map(torch.equal, states_of(made, optimizer), before))
        balancer.close()
        other = converted(how, group)
        others = adamw(other)
        dcp.load(zr.sharded_state_dict(other, others), storage_reader=zr.CheckpointReader(tmp_path / "away"))
        assert all(map(torch.equal, states_of(other, others), before))
        adapter = peft.get_peft_model_state_dict(made)
        return {name: local_of(tensor) for name, tensor in adapter.items()}, beside.state_dict()

    (adapter, weights), (other_adapter, _) = run_ranks(check, 2)
    whole.load_state_dict(weights)
    for name, tensor in peft.get_peft_model_state_dict(whole).items():
        is_column = not any(row in name for row in ("out", "down"))
        if ("lora_B" in name) == is_column:
            both = torch.cat([adapter[name], other_adapter[name]], dim=0 if is_column else 1)
            torch.testing.assert_close(both, tensor, rtol=0, atol=1e-10)
        else:
            torch.testing.assert_close(adapter[name], tensor, rtol=0, atol=1e-10)
    loaded = peft.PeftModel.from_pretrained(whole.unload(), tmp_path / "adapter")
    fresh = whole_lora()
    fresh.load_state_dict(weights)
    assert loss_of(loaded, 50).item() == pytest.approx(loss_of(fresh, 50).item(), abs=1e-10)


def require_saved(folder, expected, atol=1e-10):
    saved = load_file(folder / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=atol, msg=name)


def with_two_adapters(model):
    options = {"init_lora_weights": False, "modules_to_save": ["head"]}
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up"], **options))
    return model.double()  # as newer versions add it in float32


@on_ranks(2)
def test_whole_adapters_are_saved_whether_they_train_or_not_and_errors_reach_all_ranks(rank, group, *, tmp_path):
    whole = with_two_adapters(whole_lora(modules_to_save=["head"]))
    model = with_two_adapters(divided("layers", group, modules_to_save=["head"]))
    zr.convert(model, process_group=group, segments=heads_of(model))
    model.set_adapter("other")
    for is_frozen in (False, True):
        model.requires_grad_(not is_frozen)
        model.save_pretrained(tmp_path / str(is_frozen), state_dict=None)  # as a Trainer calls it
        for adapter, folder, atol in (("default", "", 0.0), ("other", "other", float("inf"))):  # drawn anew
            expected = peft.get_peft_model_state_dict(whole, adapter_name=adapter)
            require_saved(tmp_path / str(is_frozen) / folder, expected, atol)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError if rank == 0 else RuntimeError, match="should be a directory"):
        model.save_pretrained(tmp_path / "file")
    blocks_of(model)[0].mlp.up._tp_info = None  # as PEFT marks it there
    with pytest.raises(RuntimeError, match=r"transformers 5\.4 to 5\.16: use 5\.24"):
        model.save_pretrained(tmp_path / "marked")


@on_ranks(2, [("left out",), ("late",)])
def test_a_ranks_part_is_not_saved_as_the_whole(rank, group, case, *, tmp_path):
    part = torch.nn.Linear(3, HIDDEN // 2, bias=False).double()  # as newer versions make it
    if case == "late":
        model = converted("layers", group)
        model.add_adapter("late", peft.LoraConfig(r=3, target_modules=["up"]))
        blocks_of(model)[0].mlp.up.lora_B["late"] = part
    else:
        model = divided("split first", group, targets=["mlp.up"])
        blocks_of(model)[0].mlp.up.lora_B["default"] = part
        zr.convert(model, process_group=group, module_filter_fn=lambda module, name: "attention" in name)
    why = r"up\.lora_B\.(default|late) has 24 of 48 features, and is not divided as the layer is"
    with pytest.raises(RuntimeError, match=why):
        model.save_pretrained(tmp_path / case)
    with pytest.raises(ValueError, match=why):
        zr.sharded_state_dict(model)


def loss_of_decoder(model, seed):
    return model(**batch_of_decoder(seed)).loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_a_decoder_that_transformers_has_split_moves_with_its_adapter(run_ranks, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # Gemma's norms are of float32, and rounding grows
    whole_decoder(kind).save_pretrained(tmp_path / "model")
    whole = type(whole_decoder(kind)).from_pretrained(tmp_path / "model", torch_dtype=torch.float64)  # as it is divided
    names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    with torch.no_grad():
        whole = with_lora(whole, names)
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole", no_dist=True)

    def check(rank, group):
        made, beside = with_lora(split_by_plan(tmp_path / "model", rank), names), copy.deepcopy(whole)
        zr.convert(made)
        dcp.load(zr.sharded_state_dict(made), storage_reader=zr.CheckpointReader(tmp_path / "whole"))
        kinds = sorted(segment.kind for segment in all_segments(balanced_layers(made)))
        assert kinds == ["heads", "heads", "neurons", "neurons"]
        balancer, _ = train_apart_and_save(beside, made, tmp_path, loss_of_decoder)
        require_saved_whole(beside, tmp_path)
        with balancer.at_home():
            made.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
        expected = peft.get_peft_model_state_dict(beside, save_embedding_layers=True)
        require_saved(tmp_path / "adapter", expected)
        assert {"embed_tokens", "lm_head"} <= {name.split(".")[-2] for name in expected}

    run_ranks(check, 2)


def lora_of_groups():
    return with_lora(query_heads.whole_model(), ["q", "k", "v", "out"])


def heads_of_groups(model, **options):
    inner = model.base_model.model
    return [
        query_heads.segment(
            number, column=[attention.q], shared=[attention.k, attention.v], row=attention.out, **options
        )
        for number, attention in enumerate(inner)
    ]


def divided_groups(group, **options):
    model = lora_of_groups()
    for attention in model.base_model.model:
        for name, unit in {"q": query_heads.HEAD, "k": 1, "v": 1, "out": query_heads.HEAD}.items():
            made_by = zr.RowParallelLinear if name == "out" else zr.ColumnParallelLinear
            replace_linear(attention, name, partial(made_by.from_linear, process_group=group, unit_size=unit))
    return zr.convert(model, process_group=group, segments=heads_of_groups(model, **options))


def loss_of_heads(model, seed):
    return (model(query_heads.X) * (1 + seed % 3)).square().mean()


@pytest.mark.slow
@pytest.mark.usefixtures("copies_are_cheap")
@on_ranks(2)
def test_groups_of_queries_that_are_apart_share_the_rows_of_matrices(rank, group):
    model, whole = divided_groups(group, divisible=True), lora_of_groups()
    attentions = model.base_model.model
    segments = [attention.out.base_layer.segment for attention in attentions]
    assert [segment.owned.slices for segment in segments] == [1, 1]  # heads stay whole
    optimizer = adamw(model)
    balancer = exact(model, optimizer)
    moves = {0: (3, 5), 1: (5, 3), 2: (8, 0), 3: (1, 1), 4: (3, 5)}
    computed = train(model, optimizer, 6, zr.clip_grad_norm_, moving(balancer, moves), loss_of_heads)
    assert computed == pytest.approx(train(whole, adamw(whole), 6, clip_grad_norm_, loss=loss_of_heads), rel=1e-10)
    assert segments[0].counts == (3, 5) and len(segments[0].owned.apart)
    assert attentions[0].k.lora_B.default.weight.shape[0] == query_heads.HEAD * (1 + rank)
    rows = [SimpleNamespace(out=attention.out.base_layer) for attention in attentions]
    query_heads.require_copies_alike(rows, group)


@on_ranks(2)
def test_what_computes_otherwise_than_lora_is_refused_by_name(rank, group):
    for how in HOWS[:2]:
        model = divided(how, group, targets=["mlp.up"], use_dora=True)
        with pytest.raises(ValueError, match=r"up\.lora_B\.default .* no plain LoRA, such as DoRA \(use_dora\)"):
            zr.convert(model, process_group=group)
    model = divided("layers", group, targets=["mlp.up", "mlp.gate"])
    for block in blocks_of(model):
        block.mlp.up.lora_B["default"].weight = block.mlp.gate.lora_B["default"].weight
    zr.convert(model, process_group=group)
    reasons = [layer.stays_even for name, layer in balanced_layers(model).items() if ".mlp." in name]
    assert all("lora_B.default.weight is shared with another module" in reason for reason in reasons)
    model = divided("layers", group, lora_dropout=0.1)
    zr.convert(model, process_group=group, segments=[])
    reasons = {name: layer.stays_even for name, layer in balanced_layers(model).items() if ".mlp." in name}
    assert len(reasons) == 6 and all("dropout (lora_dropout) of x" in reason for reason in reasons.values())
    with pytest.raises(ValueError, match=r"out\.base_layer: it is in a peft\.tuners\.lora.*lora_dropout"):
        model = divided("layers", group, lora_dropout=0.1)
        zr.convert(model, process_group=group, segments=heads_of(model))


@on_ranks(2)
def test_dropout_of_a_column_parallel_layers_x_is_alike_on_all_ranks_and_units_move(rank, group):
    model = divided("layers", group, targets=["mlp.up", "mlp.gate"], lora_dropout=0.5)
    zr.convert(model, process_group=group)
    optimizer = adamw(model)
    balancer = exact(model, optimizer)
    train(model, optimizer, 4, zr.clip_grad_norm_, moving(balancer, {0: (3, 1), 2: (1, 3)}))
    up = blocks_of(model)[1].mlp.up
    assert len(up.lora_B.default.weight) == (12, 36)[rank]
    both = gathered(group, up.lora_A.default.weight.detach())
    assert torch.equal(*both)


def drop_between(mlp, x):
    return mlp.down(functional.dropout(functional.silu(mlp.gate(x)), 0.3) * mlp.up(x))


@on_ranks(2)
def test_what_a_rank_drops_of_its_units_leaves_a_later_layers_dropout_alike(rank, group):
    model = divided("layers", group, targets=["mlp.up"], lora_dropout=0.5)
    mlps = [block.mlp for block in blocks_of(model)]
    for mlp in mlps:
        mlp.forward = partial(drop_between, mlp)
    named = [zr.Segment([mlp.gate, mlp.up], mlp.down, 1, kind="neurons") for mlp in mlps]
    zr.convert(model, process_group=group, segments=named)
    optimizer = adamw(model)
    torch.manual_seed(7)
    train(model, optimizer, 4, zr.clip_grad_norm_, moving(exact(model, optimizer), {0: (3, 1), 2: (1, 3)}))
    assert len(mlps[0].up.lora_B.default.weight) == (12, 36)[rank]
    assert all(torch.equal(*gathered(group, mlp.up.lora_A.default.weight.detach())) for mlp in mlps)


@on_ranks(2)
def test_an_adapter_that_comes_after_convert_is_refused(rank, group):
    model = converted("layers", group)
    optimizer = adamw(model)
    balancer = exact(model, optimizer)
    balancer.move((3, 1))
    model.add_adapter("late", peft.LoraConfig(r=2, target_modules=["up"]))
    with balancer.at_home():
        pass
    assert balancer.plan.owned == (1.0, 1.0)
    assert len(blocks_of(model)[0].mlp.up.lora_B.default.weight) == HIDDEN // 2
    with pytest.raises(RuntimeError, match=r"lora_B\.late is not divided as the layer is: wrap the model before"):
        balancer.move((1, 3))
    balancer.close()
    with pytest.raises(ValueError, match=r"up\.lora_B\.late cannot be divided .* it came after convert"):
        exact(model, optimizer)


@on_ranks(2)
def test_a_model_that_is_wrapped_after_convert_is_refused(rank, group):
    model = whole_model()
    split(model.blocks, ColwiseParallel, RowwiseParallel)
    zr.convert(model)
    wrapped = with_lora(model)
    with pytest.raises(ValueError, match=r"lora_B\.default cannot be divided .* it came after convert"):
        exact(wrapped, adamw(wrapped))


@on_ranks(2)
def test_matrices_that_styles_have_divided_after_convert_keep_all_units_at_home(rank, group):
    model = whole_model()
    split(model.blocks, ColwiseParallel, RowwiseParallel)
    zr.convert(model)
    wrapped = with_lora(model, ["mlp.up"])
    for block in model.blocks:  # newer versions make a matrix of this rank's part
        block.mlp.up.lora_B["default"] = torch.nn.Linear(3, HIDDEN, bias=False).double()
        parallelize_module(block, mesh_of(), {"mlp.up.lora_B.default": ColwiseParallel()})
    balancer = exact(wrapped, adamw(wrapped))
    with pytest.raises(RuntimeError, match=r"is in a peft\.tuners\.lora\.layer\.Linear, whose lora_B\.default is not"):
        balancer.move((3, 1))
    assert len(local_of(model.blocks[1].mlp.up.base_layer.weight)) == HIDDEN // 2


@on_ranks(2, [(how,) for how in HOWS[:2]])
def test_matrices_merge_at_home(rank, group, how):
    model = converted(how, group)
    optimizer = adamw(model)
    balancer = exact(model, optimizer)
    balancer.move((3, 1))
    expected = loss_of(model, 0).item()
    with pytest.raises(RuntimeError, match=r"merge\(\) of LoRA into .*, whose units are away: .*at_home\(\)"):
        model.merge_and_unload()
    with balancer.at_home():
        if how == "layers":
            model.merge_adapter()
        else:
            with pytest.raises(RuntimeError, match="whose weight is a DTensor, to which PEFT cannot add"):
                model.merge_adapter()
    assert blocks_of(model)[0].mlp.up.merged == (how == "layers")
    assert loss_of(model, 0).item() == pytest.approx(expected, abs=1e-10)


FORCED = {"ratio": 0.5, "ranks": [1]}


@pytest.mark.slow
@on_ranks(2, [(how,) for how in HOWS[::4]])
def test_columns_of_the_layers_within_are_lent_and_dropped_and_matrices_stay(rank, group, how, *, tmp_path):
    whole = whole_lora()
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole")
    expected = train(whole, adamw(whole), 4, clip_grad_norm_)
    for mode in ("mig", "zero-pri"):
        model = converted(how, group, tmp_path / "whole")
        optimizer = adamw(model)
        balancer = exact(model, optimizer, mode=mode, **FORCED)
        computed = train(model, optimizer, 4, zr.clip_grad_norm_, moving(balancer, {}))
        up = blocks_of(model)[0].mlp.up
        assert (up.lora_B.default.plan, up.lora_B.default.loans) == (None, None)
        if mode == "mig":
            assert computed == pytest.approx(expected, rel=1e-9) and up.base_layer.loans is not None
        else:
            assert (up.base_layer.plan is not None) == (rank == 1) and computed != pytest.approx(expected, rel=1e-3)
        balancer.close()


@pytest.mark.slow
@on_ranks(2)
def test_segments_with_lora_are_checked_by_numbers(rank, group):
    model = converted("layers", group)
    checks = zr.check_segments(model, [torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))])
    assert len(checks) == 4 and all(check.problem is None for check in checks)
