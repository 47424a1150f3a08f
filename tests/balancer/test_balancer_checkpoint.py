"""A balancer that is saved and loaded goes on as it was."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.processes import for_each
from helpers.states import held_by
from helpers.virtual_training import Run
from torch.distributed.checkpoint.api import CheckpointException

import zeroresize as zr

pytestmark = pytest.mark.same_ranks


def test_two_tensor_parallel_groups_balance_and_save_apart(run_ranks, tmp_path):
    """DP × TP: ranks 0, 1 and 2, 3; only rank 3 is slow. Rank 0 knows a group more than the others, as loggers do."""

    def train(rank, group):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        replica = groups[rank // 2]
        run = Run(replica, chi={3: 4.0})
        trace = run.updates(4)
        dcp.save({"balancer": run.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        resumed = Run(replica)
        dcp.load({"balancer": resumed.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        return trace[-1], [p.pruned for p in resumed.balancer.plan.ranks]

    for rank, (ratios, resumed) in enumerate(run_ranks(train, 4)):
        assert resumed == ratios
        assert (ratios[1] > 0.5) == (rank >= 2) and ratios[0] == 0.0


def test_a_balancer_of_another_number_of_ranks_is_an_error_that_says_to_leave_it_out(run_ranks, tmp_path):
    def check(rank, group):
        pair = dist.new_group([0, 1])
        if rank < 2:
            run = Run(pair)
            run.steps(1)
            dcp.save({"balancer": run.balancer}, checkpoint_id=tmp_path, process_group=pair)
        dist.barrier()
        run = Run(group)
        reader = zr.CheckpointReader(tmp_path)
        with pytest.raises(CheckpointException) as error:
            dcp.load({"balancer": run.balancer}, storage_reader=reader)
        run.steps(3)  # nothing has changed
        return str(error.value)

    for text in run_ranks(check, 4):
        assert (
            "'balancer' was saved on 2 ranks (0-1), and is to be loaded on 4 ranks (0-1-2-3): leave 'balancer' out of "
            "what is loaded" in text
        )
        assert "Missing key" not in text


# ---- damaged states -------------------------------------------------------------------------------------------------

SHARED, OWN = ("group 0-1", "state", 0), ("group 0-1 rank {rank}", "state", 0)
#: What is put in the place of what, and how the error tells it; GONE deletes.
GONE = object()
DAMAGE = [
    ((*SHARED[:1], "format"), 0, r"group 0-1\.format: 1 is needed, found 0"),
    ((*SHARED, "num_steps"), 12.0, r"num_steps: a whole number is needed, found 12\.0"),
    ((*SHARED, "decision", "controller", "spells"), GONE, r"controller\.spells: missing"),
    ((*SHARED, "decision", "controller", "division", "pruned"), [], "of 0 ranks, this process group has 2"),
    ((*OWN, "selector", "columns", "up", "w_var"), [1.0], r"columns\.up: rows of 48 numbers are needed"),
    ((*OWN, "selector", "columns", "down"), GONE, r"selector\.columns: .* do not fit the units"),
    ((*OWN, "units", "down"), [1, 0], r"units\.down: ascending numbers below 192 are needed"),
    ((*OWN, "measurement", "estimator", "calibrated", "ratios", 0), 0.5, "must ascend from 0"),
    ((*OWN, "seen", "state", "up"), 1.0, r"seen\.state\.up: a tensor is needed"),
]  # fmt: skip


def as_lists(state):
    """As JSON would have it, to be changed at will."""
    if isinstance(state, dict):
        return {key: as_lists(value) for key, value in state.items()}
    return [as_lists(value) for value in state] if isinstance(state, list | tuple) else state


def damaged(state, path, value, rank):
    changed = as_lists(state)
    *way, last = [key.format(rank=rank) if isinstance(key, str) else key for key in path]
    place = changed
    for key in way:
        place = place[key]
    if value is GONE:
        del place[last]
    else:
        assert len(path) == 1 or place[last] is not None, "else the test tells nothing"
        place[last] = value
    return changed


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second or (first != first and second != second)


def test_a_damaged_state_is_refused_by_what_is_wrong_with_it_and_changes_nothing(run_ranks):
    def load(rank, group):
        config = {
            "mode": "semi",
            "priority": "variation",
            "budget": 1.0,
            "paper": {"imputation": "same", "num_migrating": 0},
        }
        first = Run(group, chi={1: 4.0}, **config)
        first.updates(4)
        state = first.balancer.state_dict()
        other = Run(group, chi={1: 4.0}, **config)  # which takes the clock
        other.updates(2)
        before = as_lists(other.balancer.state_dict())
        assert held_by(state, "group 0-1")["decision"]["received"] is not None
        for path, value, message in DAMAGE:
            with pytest.raises(ValueError, match=message) as refused:
                other.balancer.load_state_dict(damaged(state, path, value, rank))
            assert "cannot be loaded: group 0-1" in str(refused.value)
            assert same(as_lists(other.balancer.state_dict()), before), path
        other.balancer.load_state_dict(as_lists(state))
        return same(as_lists(other.balancer.state_dict()), as_lists(state))

    assert run_ranks(load, 2) == [True, True]


def test_a_state_that_is_damaged_on_one_rank_is_refused_on_all_at_once(run_ranks):
    """In modes that migrate ranks meet as they load: nobody waits for the one that cannot."""

    def load(rank, group):
        run = Run(group, chi={1: 4.0}, mode="semi")
        run.updates(3)
        state = run.balancer.state_dict()
        if rank == 1:
            del held_by(state, "group 0-1 rank 1")["selector"]
        message = r"rank 1\.selector: missing" if rank == 1 else r"ranks \[1\] of the group cannot load"
        with pytest.raises(ValueError, match=message):
            run.balancer.load_state_dict(state)
        run.updates(2)  # and all goes on

    run_ranks(load, 2, timeout_s=30)


def test_every_mode_can_load_what_it_saved_also_as_json(run_ranks):
    @for_each([("off",), ("zero-pridiff",), ("mig",), ("semi",), ("exact",)])
    def load(rank, group, mode):
        # A move would be made, and timed, while the state is loaded.
        stays = {"moves": False} if mode == "exact" else {}
        first = Run(group, chi={1: 4.0}, mode=mode, **stays)
        first.updates(5)
        other = Run(group, chi={1: 4.0}, mode=mode, **stays)
        state = as_lists(first.balancer.state_dict())
        key = f"group 0-1 rank {rank}"
        tensors = {name: held_by(state, key).pop(name) for name in ("seen", "last_gradients")}
        state = json.loads(json.dumps(state))
        held_by(state, key).update(tensors)
        other.balancer.load_state_dict(state)
        return same(as_lists(other.balancer.state_dict()), state)

    assert run_ranks(load, 2) == [[True] * 5] * 2
