"""What some stages have written, others go on from, however many there are."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import pipelines
from helpers.faults import Evil, put_into_planner_data
from helpers.on_ranks import on_ranks
from helpers.pipelines import BOUNDARIES, MAX_NORM, OPTIMIZERS, assert_same, held, pipeline_of, undivided
from helpers.processes import runner_in
from helpers.states import values_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import zeroresize as zr
from zeroresize.pipeline import PipelineBalancer, layer_contents, repack

pytestmark = pytest.mark.same_ranks


def loaded(folder, pipeline, optimizer=None, **beside):
    """As docs/pipelines.md has it."""
    state = {**zr.sharded_state_dict(pipeline, optimizer), **beside}
    dcp.load(state, storage_reader=zr.CheckpointReader(folder), process_group=pipeline.process_group)


class Training(pipelines.Training):
    """One that is saved."""

    def save(self, folder, **options):
        state = {**zr.sharded_state_dict(self.pipeline, self.optimizer), **options}
        dcp.save(state, checkpoint_id=folder, process_group=self.pipeline.process_group)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By two stages, left of four."""
    tmp_path = tmp_path_factory.mktemp("written")

    def check(rank, group):
        training = Training(group)
        training.train(2)
        if repack(training.pipeline, training.optimizer, num_stages=2).is_released:
            with pytest.raises(RuntimeError, match="this rank was released"):
                zr.sharded_state_dict(training.pipeline)
            return {}, training.losses
        training.train(1)
        training.save(tmp_path / "saved")
        training.optimizer.zero_grad()
        return held(training.pipeline, training.optimizer), training.losses

    by_rank = runner_in(tmp_path)(check, 4)
    whole = {key: one for found, _ in by_rank for key, one in found.items()}
    return tmp_path / "saved", whole, by_rank[3][1] + by_rank[1][1]


@pytest.mark.few(2)
@pytest.mark.parametrize("num_stages", [4, 3, 1])
def test_training_goes_on_on_any_number_of_stages(run_ranks, written, num_stages):
    folder, whole, losses = written

    def check(rank, group):
        training = Training(group, BOUNDARIES[num_stages][-1])
        training.pipeline.layers[6].weight.data.zero_()
        loaded(folder, training.pipeline, training.optimizer)
        tensors, training.step = held(training.pipeline, training.optimizer), 3
        training.train(2)
        return tensors, training.losses

    by_rank = run_ranks(check, num_stages)
    tensors = {key: one for found, _ in by_rank for key, one in found.items()}
    assert_same(dict(sorted(tensors.items())), dict(sorted(whole.items())))
    expected, _ = undivided(OPTIMIZERS["AdamW"], 5, MAX_NORM)
    assert losses + by_rank[-1][1] == pytest.approx(expected, rel=1e-10, abs=0.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_names_are_those_of_the_whole_model(written):
    folder, whole, _ = written
    model = nn.ModuleDict({"layers": nn.ModuleList(pipelines.layers_of())})
    state = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    state["optimizer.layers.1.up.weight.exp_avg"] = torch.zeros_like(model["layers"][1].up.weight)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    average = state.pop("optimizer.layers.1.up.weight.exp_avg")
    assert torch.equal(average, whole["layers.1.up.weight exp_avg"])
    for name, value in state.items():
        assert torch.equal(value, whole[name]), name


@on_ranks(2)
def test_what_is_read_is_what_was_there_when_it_was_written(rank, group, *, tmp_path):
    """State of any shape; none where the file is of before the first step, and some where a new optimizer has none."""

    def read_into(training, name, before):
        loaded(tmp_path / name, training.pipeline, training.optimizer)
        after = held(training.pipeline, training.optimizer)
        assert_same(after, {key: one for key, one in before.items() if "gradient" not in key})

    for name in ("SGD", "Adafactor", "AdamW, fused"):
        training = Training(group, name=name)
        training.save(tmp_path / f"{name}, new")
        new = held(training.pipeline, training.optimizer)
        training.train(1)
        training.save(tmp_path / name)
        old = held(training.pipeline, training.optimizer)
        training.train(1)
        training.optimizer.zero_grad()
        read_into(training, name, old)
        read_into(training, f"{name}, new", new)
        read_into(Training(group, name=name), name, old)
    training.train(1)
    training.optimizer.zero_grad()
    state = zr.sharded_state_dict(training.pipeline, training.optimizer)
    before = held(training.pipeline, training.optimizer)
    done = dcp.async_save(state, checkpoint_id=tmp_path / "later", process_group=group)
    for parameter in training.pipeline.parameters():
        parameter.data.zero_()
    done.result()
    read_into(training, "later", before)


class Pruned(nn.Module):
    """Once pruned it keeps the values that are not zero, one after another, and where they are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.register_buffer("places", None)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.inner = nn.Dropout(0.0)
        self.num_prunings = 0

    def prune(self):
        self.places = torch.nonzero(self.weight.detach().abs().flatten() > 0.5).flatten()
        self.weight.data = self.weight.detach().flatten()[self.places]
        self.num_prunings += 1

    def get_extra_state(self):
        return {"num_prunings": self.num_prunings}

    def set_extra_state(self, state):
        self.num_prunings = state["num_prunings"]

    def forward(self, x):
        dense = self.weight
        if self.places is not None:
            dense = torch.zeros(16, dtype=torch.float64).scatter(0, self.places, self.weight).view(4, 4)
        return self.inner(x @ dense)


def pruned_pipeline(group, boundaries):
    torch.manual_seed(0)
    layers = [Pruned() for _ in range(4)]
    pipeline = pipeline_of(group, boundaries, loss=nn.functional.mse_loss, layers=layers)
    return pipeline, torch.optim.AdamW(pipeline.parameters(), lr=0.1)


def steps_of(pipeline, optimizer, num_steps):
    x = torch.arange(32, dtype=torch.float64).view(8, 4).sin()
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = pipeline.step(x, target=x)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return losses


def test_layers_are_read_in_the_shapes_in_which_they_were_written(run_ranks, tmp_path):
    def save(rank, group):
        pipeline, optimizer = pruned_pipeline(group, (0, 1, 2, 4))
        for number in pipeline.present:
            pipeline.layers[number].prune()
        if rank == 2:
            pipeline.layers[3].weight.requires_grad_(False)
            pipeline.layers[2].inner.eval()
        steps_of(pipeline, optimizer, 2)
        state = zr.sharded_state_dict(pipeline, optimizer)
        dcp.save(state, checkpoint_id=tmp_path / "saved", process_group=group)
        return steps_of(pipeline, optimizer, 3)

    def load(rank, group):
        pipeline, optimizer = pruned_pipeline(group, (0, 3, 4))
        loaded(tmp_path / "saved", pipeline, optimizer)
        for number in pipeline.present:
            layer = pipeline.layers[number]
            assert layer.weight.dim() == 1 and layer.num_prunings == 1 and layer.scratch.tolist() == [1.0, 1.0]
            assert layer.weight.requires_grad == (number != 3) and layer.inner.training
            assert layer.places.dtype == torch.int64 and len(layer.places) == len(layer.weight)
        return steps_of(pipeline, optimizer, 3)

    *_, losses = run_ranks(save, 3)
    *_, losses_after_loading = run_ranks(load, 2)
    assert losses_after_loading == pytest.approx(losses, rel=1e-10, abs=0.0)


class Scaled(nn.Module):
    def __init__(self, table, weight):
        super().__init__()
        self.weight, self.table = weight, table

    def forward(self, x):
        return x * self.table.scale * self.weight


def test_tied_parameters_and_shared_buffers_are_read_too(run_ranks, tmp_path):
    def pipeline_with(group, value, boundaries):
        table, weight = nn.Module(), nn.Parameter(torch.full((4,), value))
        table.register_buffer("scale", torch.full((4,), 2 * value))
        layers = [
            Scaled(table, weight),
            Scaled(table, weight),
            Scaled(table, nn.Parameter(torch.full((4,), 3 * value))),
        ]
        return pipeline_of(group, boundaries, layers=layers)

    def save(rank, group):
        pipeline = pipeline_with(group, 1.0, (0, 2, 3))
        dcp.save(zr.sharded_state_dict(pipeline), checkpoint_id=tmp_path / "saved", process_group=group)

    def load(rank, group):
        pipeline = pipeline_with(group, 0.5, (0, 3))
        loaded(tmp_path / "saved", pipeline)
        assert pipeline.layers[0].weight is pipeline.layers[1].weight
        return [(layer.weight[0].item(), layer.table.scale[0].item()) for layer in pipeline.layers]

    run_ranks(save, 2)
    assert run_ranks(load, 1) == [[(1.0, 2.0), (1.0, 2.0), (3.0, 2.0)]]


def test_a_balancer_goes_on_with_what_it_has_learned(run_ranks, tmp_path):
    def save(rank, group):
        training = Training(group)
        balancer = PipelineBalancer(training.pipeline, training.optimizer, min_saving=0.99)  # nothing moves
        for _ in range(3):
            with balancer.step():
                training.train(1)
        training.save(tmp_path / "saved", balancer=balancer)
        return balancer.state_dict()

    def load(rank, group):
        training = Training(group)
        balancer = PipelineBalancer(training.pipeline, training.optimizer, min_saving=0.99)  # nothing moves
        loaded(tmp_path / "saved", training.pipeline, training.optimizer, balancer=balancer)
        return balancer.state_dict()

    state = run_ranks(save, 3)[0]
    (same, *_), (other, _) = run_ranks(load, 3), run_ranks(load, 2)
    costs = values_of(state)["rebalancing"]["costs"]
    assert same == state and len(costs["speeds"]) == 3
    assert values_of(other)["rebalancing"]["costs"] is None  # of devices nothing is known


@on_ranks(2)
def test_what_does_not_fit_is_told_and_changes_nothing(rank, group, *, written, tmp_path):
    folder, _, _ = written

    training = Training(group)
    training.train(1)
    before = held(training.pipeline, training.optimizer)
    pipeline, optimizer = training.pipeline, training.optimizer

    def fails(checkpoint, message, pipeline=pipeline, optimizer=optimizer):
        with pytest.raises(CheckpointException, match=message):
            loaded(checkpoint, pipeline, optimizer)
        assert_same(held(training.pipeline, training.optimizer), before)

    with pytest.raises(ValueError, match=r"storage_reader=zr\.CheckpointReader"):  # of another reader
        dcp.load(zr.sharded_state_dict(pipeline, optimizer), checkpoint_id=folder, process_group=group)
    assert_same(held(pipeline, optimizer), before)
    fails(tmp_path / "nothing", "nothing/.metadata")
    fails(folder if rank else tmp_path / "nothing", "(?s)ranks:.*\\[0\\].*nothing/.metadata")
    fails(folder, "other groups of them", optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.1))
    fails(
        folder,
        "the checkpoint is of 7 layers, and the pipeline has 8",
        pipeline_of(group, (0, 4, 8), layers=[*pipelines.layers_of(), nn.Tanh()]),
        None,
    )
    plain = tmp_path / f"plain {rank}"
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=plain, process_group=group, no_dist=True)
    fails(plain, "Missing key in checkpoint state_dict: layers")
    other = pipelines.layers_of()
    other[6].register_buffer("more", torch.ones(1))
    other[0].register_buffer("more", torch.ones(1))
    fails(folder, "layers must be built alike", pipeline_of(group, layers=other), None)
    loaded(folder, pipeline)
    assert optimizer.state


class Remembering(nn.Linear):
    """With extra state that may be anything."""

    def __init__(self, extra):
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_no_code_of_a_checkpoint_runs(run_ranks, tmp_path, monkeypatch):
    """Neither of its index nor of extra state: refused on all ranks, and nothing changes."""

    def check(rank, group):
        def pipeline_with(extra):
            layers = [nn.Linear(2, 2), Remembering(extra)]
            return pipeline_of(group, (0, 1, 2), loss=nn.functional.mse_loss, layers=layers)

        plain = {"plain": [1, torch.ones(2)]}
        said = {}
        for name, extra in (("plain", plain), ("index", plain), ("extra", Evil(tmp_path / "marker"))):
            folder = tmp_path / name
            writer = pipeline_with(extra)
            with monkeypatch.context() as patch:  # as somebody else may write it
                patch.setattr(layer_contents, "plain_value", lambda *_: None)
                dcp.save(zr.sharded_state_dict(writer), checkpoint_id=folder, process_group=group)
            if name == "index" and rank == 0:
                put_into_planner_data(folder, tmp_path / "marker")
            torch.distributed.barrier(group)
            pipeline = pipeline_with(None)
            before = pipeline.layers[rank].weight.detach().clone()
            try:
                loaded(folder, pipeline)
            except CheckpointException as error:
                said[name] = str(error)
                assert torch.equal(pipeline.layers[rank].weight, before) and pipeline.layers[1].extra is None
            else:
                assert rank == 0 or pipeline.layers[1].extra["plain"][1].tolist() == [1.0, 1.0]
        return said

    first, last = run_ranks(check, 2)
    assert not (tmp_path / "marker").exists()
    assert first.keys() == last.keys() == {"index", "extra"}
    assert "names posix.system, which is none of the classes" in first["index"]
    assert (
        "extra state of layers.1: not read, since it is damaged or of a class whose reading could run" in last["extra"]
    )
