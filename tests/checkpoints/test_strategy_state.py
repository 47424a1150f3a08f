"""Checkpoints of any strategy that load into any other, and on another number of ranks, bit by bit."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import on_ranks
from torch.distributed.checkpoint import FileSystemReader

import zeroresize as zr
from lm_examples.llama import LlamaConfig, llama_layers
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel

WHOLE = Strategy()
CONFIG = LlamaConfig(num_blocks=2, hidden_size=8, num_heads=4, mlp_size=8)


def layers_of(seed):
    torch.manual_seed(seed)
    return [one.double() for one in llama_layers(CONFIG)]


def whole_of(seed):
    return {
        f"layers.{number}.{name}": parameter.detach()
        for number, layer in enumerate(layers_of(seed))
        for name, parameter in layer.named_parameters()
    }


def built(optimizer_strategy, group, seed):
    model = SwitchableModel(layers_of(seed), strategies=[optimizer_strategy, WHOLE], process_group=group)
    return model, torch.optim.AdamW([{"params": list(model.parameters())}], lr=0.5 - 0.1 * seed)


def save(folder, optimizer_strategy, group):
    """With state that follows from the weights: twice as large, squared, and step 3."""
    model, optimizer = built(optimizer_strategy, group, seed=1)
    for parameter in model.parameters():
        values = parameter.detach()
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": 2 * values, "exp_avg_sq": values * values}
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder, process_group=group)


def load(folder, optimizer_strategy, group):
    """The whole weights, on rank 0, as the checkpoint gave them; what else it gave is checked here."""
    model, optimizer = built(optimizer_strategy, group, seed=2)
    dcp.load(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder, process_group=group)
    for parameter in model.parameters():
        state, values = optimizer.state[parameter], parameter.detach()
        assert torch.equal(state["exp_avg"], 2 * values) and torch.equal(state["exp_avg_sq"], values * values)
        assert float(state["step"]) == 3.0
    assert optimizer.param_groups[0]["lr"] == 0.4
    model.switch_to(WHOLE)
    placed = model.stage_layers.items()
    return {f"layers.{number}.{name}": one.detach() for number, own in placed for name, one in own.named_parameters()}


OF_FOUR_RANKS = [
    Strategy(2, 1, 2),
    Strategy(1, 4, 1),
    Strategy(2, 2, 1, ranks=(3, 1, 0, 2)),
    Strategy(1, 3, 1, shares=(2, 1, 1), ranks=(3, 0, 2)),
]
OF_TWO_RANKS = [
    Strategy(1, 2, 1),
    Strategy(1, 1, 2, boundaries=(0, 1, 4)),
    Strategy(1, 2, 1, shares=(3, 0)),
    Strategy(ranks=(1,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_what_one_optimizer_strategy_wrote_any_other_one_reads_on_other_ranks(run_ranks, tmp_path, before, after):
    optimizer_strategies = {4: OF_FOUR_RANKS, 2: OF_TWO_RANKS}

    def save_all(rank, group):
        for number, optimizer_strategy in enumerate(optimizer_strategies[before]):
            save(tmp_path / str(number), optimizer_strategy, group)

    def load_all(rank, group):
        return [
            load(tmp_path / str(number), optimizer_strategy, group)
            for number, optimizer_strategy in enumerate(optimizer_strategies[after])
        ]

    run_ranks(save_all, before)
    expected = whole_of(1)
    for number in range(len(optimizer_strategies[before])):
        stored = FileSystemReader(tmp_path / str(number)).read_metadata().state_dict_metadata
        assert {name: stored[name].size for name in expected} == {name: one.shape for name, one in expected.items()}
    for state in run_ranks(load_all, after)[0]:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], one) for name, one in expected.items())


@on_ranks(2)
def test_it_is_refused_within_a_step_and_a_new_optimizer_has_no_state(rank, group, *, tmp_path):
    model, optimizer = built(Strategy(1, 2, 1), group, seed=1)
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "new", process_group=group)
    dcp.load(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "new", process_group=group)
    assert not optimizer.state
    model.switch_to(WHOLE)
    with pytest.raises(RuntimeError, match=r"strategy \(1, 1, 1\) is in force"):
        zr.sharded_state_dict(model, optimizer)
