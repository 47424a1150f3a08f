"""A damaged checkpoint is refused, or all that it gives is bitwise what was saved: units, layers and strategies."""

import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.parallel_layers import block, segments_of, uneven
from helpers.pipelines import held
from test_pipeline_state import Training as PipelineTraining
from test_strategy_state import layers_of
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zeroresize as zr
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding.units.moving_units import move_units
from zeroresize.strategy.model import SwitchableModel

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Job:
    """A model with its optimizer that is saved by two ranks, and read by one."""

    def __init__(self, model, optimizer, group):
        self.model, self.optimizer, self.group = model, optimizer, group

    def save(self, folder):
        state = {
            **zr.sharded_state_dict(self.model, self.optimizer),
            "beside": {"numbers": torch.arange(5), "name": "a"},
        }
        dcp.save(state, checkpoint_id=folder, process_group=self.group)

    def load(self, folder):
        """Everything that is read, or None where it was refused."""
        beside = {"numbers": torch.zeros(5, dtype=torch.int64), "name": "b"}
        state = {**zr.sharded_state_dict(self.model, self.optimizer), "beside": beside}
        try:
            dcp.load(state, storage_reader=zr.CheckpointReader(folder), process_group=self.group)
        except (dcp.CheckpointException, ValueError, RuntimeError):
            return None
        groups = [{key: value for key, value in one.items() if key != "params"} for one in self.optimizer.param_groups]
        return self.tensors() | {"groups": repr(groups), "beside": repr(beside)}

    def tensors(self):
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        of_optimizer = self.optimizer.state.items()
        state = {f"{names[id(one)]} {key}": value for one, values in of_optimizer for key, value in values.items()}
        return {name: one.detach().clone() for name, one in (dict(self.model.named_parameters()) | state).items()}


def units(group, is_saved):
    model = block(group, 1 if is_saved else 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if is_saved else 0.2)
    if is_saved:
        segments = segments_of(model, group)
        for segment in segments:
            for where in segment.tensors:
                where.owner.segment = segment
        move_units(segments, uneven(2, 0), process_group=group, optimizer=optimizer)
    return with_state(Job(model, optimizer, group), is_saved)


def strategies(group, is_saved):
    strategy = Strategy(1, 2, 1, shares=(3, 1)) if is_saved else Strategy()
    model = SwitchableModel(layers_of(1 if is_saved else 2), strategies=[strategy], process_group=group)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=0.1 if is_saved else 0.2)
    return with_state(Job(model, optimizer, group), is_saved)


def with_state(job, is_saved):
    if is_saved:
        for number, parameter in enumerate(job.model.parameters()):
            state = {
                "step": torch.tensor(3.0 + number),
                "exp_avg": 2 * parameter.detach(),
                "exp_avg_sq": 3 * parameter.detach(),
            }
            job.optimizer.state[parameter] = state
    return job


class Layers(Job):
    def __init__(self, group, is_saved):
        training = PipelineTraining(group)
        if is_saved:
            training.train(2)
            training.optimizer.zero_grad()
        super().__init__(training.pipeline, training.optimizer, group)

    def tensors(self):
        return held(self.model, self.optimizer)


def is_same(first, second):
    return first.keys() == second.keys() and all(
        first[key] == second[key] if isinstance(first[key], str) else torch.equal(first[key], second[key])
        for key in first
    )


WINGS = {"units": units, "layers": Layers, "strategies": strategies}


@pytest.mark.parametrize("wing", WINGS)
def test_a_flipped_bit_is_told_or_changes_nothing(run_ranks, tmp_path, wing):
    """In payloads, headers and index."""
    num_flips, folder = 70, tmp_path / "saved"

    def check(rank, group):
        whole = WINGS[wing](group, False).load(folder)
        assert whole is not None
        chance, outcomes = random.Random(wing), []
        files = sorted(folder.iterdir())
        assert [file.name for file in files] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        for number in range(num_flips):
            file = files[number % len(files)]
            content = file.read_bytes()
            place = chance.randrange(8 * len(content))
            damaged = bytearray(content)
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            read = WINGS[wing](group, False).load(folder)
            outcomes.append(read is None)
            assert read is None or is_same(read, whole), (file.name, place)
            file.write_bytes(content)
        return sum(outcomes)

    run_ranks(lambda rank, group: WINGS[wing](group, True).save(folder), 2)
    (num_refused,) = run_ranks(check, 1)
    assert num_flips / 3 < num_refused < num_flips


@pytest.mark.parametrize("wing", WINGS)
@pytest.mark.parametrize("of_other", [".metadata", "__1_0.distcp"])
def test_a_file_of_another_save_is_refused(run_ranks, tmp_path, wing, of_other):
    def save(rank, group):
        job = WINGS[wing](group, True)
        job.save(tmp_path / "first")
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(1)
        job.save(tmp_path / "second")

    def check(rank, group):
        before = WINGS[wing](group, False).load(tmp_path / "first")
        shutil.copy(tmp_path / "second" / of_other, tmp_path / "first" / of_other)
        return before is not None, WINGS[wing](group, False).load(tmp_path / "first") is None

    run_ranks(save, 2)
    assert run_ranks(check, 1) == [(True, True)]


def test_torchs_own_programs_read_what_holds_checksums(run_ranks, tmp_path):
    def check(rank, group):
        units(group, True).save(tmp_path / "saved")
        return block(group, 1)[2].weight.detach()

    weight = run_ranks(check, 2)[0]
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "plain.pt")
    assert torch.equal(torch.load(tmp_path / "plain.pt", weights_only=True)["2.weight"], weight)


def test_two_saves_at_once_of_a_state_have_checksums_of_their_own(run_ranks, tmp_path):
    def check(rank, group):
        job = units(group, True)
        state = zr.sharded_state_dict(job.model, job.optimizer)
        later = dcp.async_save(state, checkpoint_id=tmp_path / "first", process_group=torch.distributed.new_group())
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(1.0)
        dcp.save(state, checkpoint_id=tmp_path / "second", process_group=group)
        later.result()

    def load(rank, group):
        first, second = (units(group, False) for _ in range(2))
        for job, name in ((first, "first"), (second, "second")):
            state = zr.sharded_state_dict(job.model, job.optimizer)
            dcp.load(state, storage_reader=zr.CheckpointReader(tmp_path / name), process_group=group)
        pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
        assert all(torch.equal(before + 1.0, after) for before, after in pairs)

    run_ranks(check, 2)
    run_ranks(load, 1)


def test_a_checkpoint_of_others_holds_no_checksums_and_says_so(tmp_path, caplog):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    dcp.load(zr.sharded_state_dict(other), storage_reader=zr.CheckpointReader(tmp_path))
    assert torch.equal(other.weight, model.weight)
    assert any("holds no checksums" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("length", [0.1, 0.5, 0.9])
def test_a_file_that_is_cut_is_named(tmp_path, length):
    model = nn.Linear(30, 20)
    dcp.save(zr.sharded_state_dict(model), checkpoint_id=tmp_path)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: int(length * file.stat().st_size)])
    with pytest.raises((ValueError, dcp.CheckpointException), match=file.name):
        dcp.load(zr.sharded_state_dict(model), storage_reader=zr.CheckpointReader(tmp_path))


def test_a_checkpoint_of_before_there_were_checksums_says_how_it_is_read(tmp_path, caplog):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    state, target = (zr.sharded_state_dict(each, torch.optim.SGD(each.parameters())) for each in (model, other))
    del state["zeroresize.checksums"]
    dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises((ValueError, dcp.CheckpointException), match="Missing key"):
        dcp.load(target, storage_reader=zr.CheckpointReader(tmp_path))
    assert "this checkpoint is of before there were any" in caplog.text
    lenient = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, storage_reader=zr.CheckpointReader(tmp_path), planner=lenient)
    assert torch.equal(other.weight, model.weight)
    with torch.no_grad():
        other.weight.zero_()
    del target["zeroresize.checksums"]
    dcp.load(target, storage_reader=zr.CheckpointReader(tmp_path))
    assert torch.equal(other.weight, model.weight)
