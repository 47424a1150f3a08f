"""Routed experts that plans of transformers 5 have split: of every expert a rank holds the same neurons, which move."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.processes import caught_log_lines
from helpers.transformers_models import as_rank, batch, split_by_plan, train, whole_decoder
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

pytestmark = pytest.mark.hosts
EXACT = zr.BalanceConfig(mode="exact")


def experts_of(model):
    return {name: module for name, module in model.named_modules() if name.endswith(".experts")}


def saved(kind, folder, dtype=torch.float64, **settings):
    whole = whole_decoder(kind).to(dtype)
    vars(whole.config).update(settings)
    whole.save_pretrained(folder)
    return whole


def split(folder, rank, implementation="eager", dtype=torch.float64):
    model = split_by_plan(folder, rank).to(dtype)
    model.config._experts_implementation = implementation
    return model


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_neurons_of_all_experts_move_in_every_implementation(run_ranks, tmp_path, monkeypatch, kind, implementation):
    # Norms and routers are of float32 whatever they are given.
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64
    tolerance = 5e-5 if dtype == torch.float32 else 1e-9
    whole = saved(kind, tmp_path / "whole", dtype)
    whole.config._experts_implementation = implementation
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = train(whole, optimizer, 4, clip_grad_norm_)

    def check(rank, group):
        host, model = (split(tmp_path / "whole", rank, implementation, dtype) for _ in range(2))
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        zr.convert(model)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        gradients = []
        for each in (host, model):
            each(**batch(7)).loss.backward()
            gradients.append([local_of(one.grad) for name, one in each.named_parameters() if ".experts." in name])
        model.zero_grad()
        assert all(map(torch.equal, *gradients))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        balancer = zr.Balancer(model, optimizer, EXACT)
        layer = next(reversed(experts_of(model).values()))
        assert layer.stays_even is None
        num_experts, neurons = len(layer.down_proj), local_of(layer.down_proj).shape[2]
        counts = []

        def after(step):
            balancer.step()
            if step in (0, 2):
                balancer.move(((3, 1), None, (1, 3))[step])
                counts.append(local_of(layer.down_proj).shape[2])
                assert local_of(layer.gate_up_proj).shape[:2] == (num_experts, 2 * counts[-1])

        assert train(model, optimizer, 4, zr.clip_grad_norm_, after=after) == pytest.approx(expected, abs=tolerance)
        assert counts == [neurons * share // 2 for share in ((3, 1)[rank], (1, 3)[rank])]
        assert balancer.layer_times() == {} or balancer.layer_times()[layer.name_in_model] > 0.0
        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "away")
        balancer.close()

    run_ranks(check, 2)
    state = {name: torch.empty_like(value) for name, value in whole.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "away")
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            state[name], value, atol=20 * tolerance if dtype == torch.float32 else tolerance, rtol=0
        )


def test_interleaved_experts_with_biases_train_as_whole_though_the_host_adds_a_bias_by_every_rank(
    run_ranks, tmp_path, monkeypatch
):
    """gpt-oss, whose own plan splits no experts, by a plan that is given."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    whole = whole_decoder("gpt_oss")
    for name, parameter in whole.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    whole.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        loss = whole(**batch(7)).loss.item()
    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 4, clip_grad_norm_, micro_batches=2)
    plan = {"": "moe_tp_experts", ".gate_up_proj": "rowwise", ".gate_up_proj_bias": "rowwise", ".down_proj": "colwise"}
    plan = {f"model.layers.*.mlp.experts{name}": style for name, style in plan.items()}

    def check(rank, group):
        model = split_by_plan(tmp_path / "whole", rank, plan=plan)
        with torch.no_grad():
            assert abs(model(**batch(7)).loss.item() - loss) > 1e-3
            zr.convert(model)
            assert model(**batch(7)).loss.item() == pytest.approx(loss, abs=1e-12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        balancer = zr.Balancer(model, optimizer, EXACT)
        moves = {0: (3, 1), 2: (1, 3)}

        def after(step):
            balancer.step()
            if step in moves:
                balancer.move(moves[step])

        values = train(model, optimizer, 4, zr.clip_grad_norm_, after=after, micro_batches=2)
        assert values == pytest.approx(expected, abs=1e-9)
        layer = experts_of(model)["model.layers.1.mlp.experts"]
        assert local_of(layer.gate_up_proj_bias).shape == (4, 2 * (16, 48)[rank])
        with balancer.at_home():
            model.save_pretrained(tmp_path / "trained")
        balancer.close()

    run_ranks(check, 2)
    reloaded = type(whole).from_pretrained(tmp_path / "trained", dtype=torch.float64)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(reloaded.state_dict()[name], value, atol=1e-9, rtol=0)


def stepped(model):
    """An optimizer that has stepped by gradients like the weights: element by element alike in any division."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def held(model, optimizer):
    """This rank's weights and moments, by name."""
    moments = {name: optimizer.state[each]["exp_avg"] for name, each in model.named_parameters()}
    return {name: (local_of(each.detach()), local_of(moments[name])) for name, each in model.named_parameters()}


MLP = "model.layers.*.mlp"
PACKED = {"mixtral": "auto", "phi3": {f"{MLP}.gate_up_proj": "packed_colwise", f"{MLP}.down_proj": "rowwise"}}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_that_stay_even_are_saved_and_loaded_as_those_of_the_undivided_model(
    run_ranks, tmp_path, monkeypatch, kind
):
    """Gate and up lie in one: of experts that some models convert and move, and of layers that are left alone."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    whole = saved(kind, tmp_path / "whole")
    trained = stepped(whole)

    def saved_and_loaded(model, optimizer, folder, other, others):
        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / folder)
        dcp.load(zr.sharded_state_dict(other, others), storage_reader=zr.CheckpointReader(tmp_path / folder))

    def check(rank, group):
        model, again, moving, fresh = (split_by_plan(tmp_path / "whole", rank, plan=PACKED[kind]) for _ in range(4))
        optimizer, others = stepped(model), torch.optim.AdamW(again.parameters())
        expected = held(model, optimizer)
        saved_and_loaded(model, optimizer, "even", again, others)
        again_held = held(again, others)
        assert all(all(map(torch.equal, again_held[name], each)) for name, each in expected.items())
        if kind == "phi3":
            return
        experts_of(moving)["model.layers.0.mlp.experts"].act_fn = torch.nn.Softmax(-1)  # of all neurons: these stay
        optimizer, others = (torch.optim.AdamW(each.parameters()) for each in (moving, fresh))
        balancer = zr.Balancer(moving, optimizer, EXACT)
        balancer.move((3, 1))
        widths = [local_of(experts.down_proj).shape[2] for experts in experts_of(moving).values()]
        assert widths[1] == (3, 1)[rank] * widths[0] // 2
        state = zr.sharded_state_dict(moving, optimizer)
        dcp.load(state, storage_reader=zr.CheckpointReader(tmp_path / "even"))
        saved_and_loaded(moving, optimizer, "away", fresh, others)
        balancer.move((1, 1))
        for each, of in ((moving, optimizer), (fresh, others)):
            now = held(each, of)
            assert all(all(map(torch.equal, now[name], pair)) for name, pair in expected.items())
        balancer.close()

    run_ranks(check, 2)
    for folder in ("even", "away") if kind == "mixtral" else ("even",):
        wanted = held(whole, trained)
        model = {name: torch.empty_like(weight) for name, (weight, _) in wanted.items()}
        moments = {f"{name}.exp_avg": torch.empty_like(moment) for name, (_, moment) in wanted.items()}
        dcp.load({**model, "optimizer": moments}, checkpoint_id=tmp_path / folder)
        for name, pair in wanted.items():
            assert all(map(torch.equal, (model[name], moments[f"{name}.exp_avg"]), pair)), (folder, name)


def test_what_stays_is_named(run_ranks, tmp_path, monkeypatch):
    saved("mixtral", tmp_path / "whole")

    def check(rank, group):
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        model = split(tmp_path / "whole", rank)
        optimizer = torch.optim.AdamW(model.parameters())
        refusal = r"layer model\.layers\.0\.mlp\.experts \(MovedMixtralExperts\) computes by its host's own forward"
        for mode in ("zero-rd", "mig"):
            with pytest.raises(ValueError, match=refusal):
                zr.Balancer(model, optimizer, zr.BalanceConfig(mode=mode))
        balancer = zr.Balancer(model, optimizer, EXACT)
        model.config._experts_implementation = "batched_mm"
        with pytest.raises(RuntimeError, match="experts_implementation was changed after convert"):
            balancer.move((3, 1))
        balancer.close()

        def mixing(self, gate_up):  # each neuron reads another one's gate
            gate, up = gate_up.chunk(2, -1)
            return self.act_fn(gate.flip(-1)) * up

        mixed = split(tmp_path / "whole", rank)
        experts = next(iter(experts_of(mixed).values()))
        experts.act_fn = torch.nn.Softmax(-1)
        zr.convert(mixed)
        assert "MovedMixtralExperts: its forward, computed with numbers, is no sum over neurons" in experts.stays_even

        with as_rank(rank, 2):
            config = DistributedConfig(tp_plan="auto", tp_size=2, enable_expert_parallel=True)
            parallel = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", distributed_config=config)
        with caught_log_lines() as lines:
            zr.convert(parallel)
        said = [str(line) for line in lines if "experts is left alone: whole experts lie on a rank" in str(line)]
        assert len(said) == 2

    run_ranks(check, 2)
