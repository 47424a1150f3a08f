"""Balancing by priority, on real ranks: which columns are pruned, and that a resumed run prunes the same."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.processes import for_each
from helpers.states import held_by
from helpers.virtual_training import FEATURES, Run

from zeroresize.config.keys import PRIORITIES

pytestmark = pytest.mark.same_ranks


def weights(run):
    return {name: getattr(run.model, name).weight.detach().double() for name in ("up", "down")}


def run_of_one_full_epoch(group, **config):
    """A run that pruned nothing in its first epoch, and each layer's δ_i = Σ_j |Δw_ji| / N over it."""
    run = Run(group, iters_per_epoch=4, ageing=0.0, priority="variation", **config)
    began = {name: weight.clone() for name, weight in weights(run).items()}
    run.steps(4)
    return run, {name: (weight - began[name]).abs().mean(dim=0) for name, weight in weights(run).items()}


def prune(run, ratio):
    """All ranks, from now on; a mask of pruned columns by layer."""
    for rank in range(2):
        run.balancer.pin(rank, ratio)
    return {
        name: torch.isin(torch.arange(getattr(run.model, name).num_columns), pruned)
        for name, pruned in run.pruned().items()
    }


def test_in_the_second_epoch_the_columns_that_moved_least_are_pruned(run_ranks):
    @for_each([("zero-pri",), ("zero-pridiff",)])
    def check(rank, group, mode):
        run, delta = run_of_one_full_epoch(group, mode=mode)
        is_pruned = prune(run, 0.5)
        for name, moved in delta.items():
            mask = is_pruned[name]
            assert 0 < mask.sum() < len(mask)
            assert moved[mask].max() < moved[~mask].min()
            if mode == "zero-pri":
                assert mask.sum() == len(mask) // 2

    run_ranks(check, 2)


def test_what_is_lent_is_most_important_and_what_is_pruned_least(run_ranks):
    def train(rank, group):
        run = Run(group, chi={1: 4.0}, mode="semi", update_every=5, ageing=0.0, tolerance=0.5)
        run.steps(5)
        run.balancer.epoch_end()  # from here on the importance of every column is known
        run.updates(6)
        run.steps(1)  # which may be one at full work
        w_vars = []
        for name, layer in (("up", run.model.up), ("down", run.model.down)):
            if layer.plan is not None:
                state = held_by(run.balancer.state_dict(), f"group 0-1 rank {rank}")
                w_var = torch.tensor(state["selector"]["columns"][name]["w_var"])
                w_vars.append([w_var[columns] for columns in (layer.plan.pruned, layer.plan.keep_P, layer.plan.lent)])
        return w_vars

    layers = run_ranks(train, 2)[1]
    assert layers
    for pruned, kept, lent in layers:
        assert lent.numel() and pruned.numel()
        assert pruned.max() <= kept.min() and kept.max() <= lent.min()


def test_a_pin_on_one_rank_alone_is_found_on_all_instead_of_hanging(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.updates(2)
        if rank == 1:
            run.balancer.pin(1, 0.5)
        with pytest.raises(RuntimeError, match=r"hold different plans, .* that hold the same: \[\[0\], \[1\]\]"):
            run.updates(2)

    run_ranks(train, 2, timeout_s=30)


# ---- saved and resumed ----------------------------------------------------------------------------------------------

KINDS = [
    *({"priority": priority} for priority in PRIORITIES),
    {"priority": "variation", "paper": {"snapshot": "bf16"}},
    {"priority": "path_length", "pruned_update": "freeze"},
]


@pytest.mark.slow
def test_a_run_resumed_within_an_epoch_goes_on_bit_for_bit(run_ranks, tmp_path):
    """Saved between two updates of its third epoch with a straggler; then over the ends of two epochs."""

    @for_each([("zero-pri", kind) for kind in KINDS] + [("zero-pridiff", {"priority": "variation"})])
    def train(rank, group, mode, kind):
        checkpoint = str(tmp_path / f"{mode} {kind}")

        def straggling_run():
            return Run(group, chi={1: 4.0}, mode=mode, iters_per_epoch=8, **kind)

        def go_on(run):
            """Losses and pruned columns of every step, and at last all that is known of the columns."""
            steps = []
            for step in range(16):
                run.x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(100 + step))
                losses = run.steps(1)
                steps.append((losses, {name: None if p is None else p.tolist() for name, p in run.pruned().items()}))
            return steps, repr(held_by(run.balancer.state_dict(), f"group 0-1 rank {rank}")["selector"])

        first = straggling_run()
        first.steps(19)
        dcp.save({"balancer": first.balancer}, checkpoint_id=checkpoint)
        saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
        uninterrupted = go_on(first)  # before another run takes the clock

        resumed = straggling_run()
        resumed.model.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        dcp.load({"balancer": resumed.balancer}, checkpoint_id=checkpoint)
        return uninterrupted, go_on(resumed)

    for rank, cases in enumerate(run_ranks(train, 2)):
        for uninterrupted, resumed in cases:
            assert resumed == uninterrupted
            columns = [pruned["up"] for _, pruned in uninterrupted[0]]
            assert (columns[0] is not None) == (rank == 1)
            if rank == 1:
                assert sum(one != other for one, other in pairwise(columns)) >= 2, "an epoch has its own columns"
