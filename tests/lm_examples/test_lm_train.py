"""Trainings of a GPT whose layers move, on real ranks: the same losses as undivided, also after resuming elsewhere."""

import itertools
import json

import pytest
from helpers.language_models import NUM_STEPS, config_of, keep_time, losses_of, text_of, trained, undivided

from lm_examples import pace
from lm_examples.build import build_layers
from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.run import prepare
from lm_examples.train import train
from vit_examples.harness import checkpoint_files as checkpoints
from vit_examples.harness import step_clock
from zeroresize.pipeline import LayerProfiler
from zeroresize.pipeline.first_boundaries import num_parameters
from zeroresize.utils.json_lines import read_json_lines

STRAGGLER = {"stage": 0, "chi": 4, "from_step": 3}


def same(value):
    return pytest.approx(value, rel=1e-10, abs=0.0)


@pytest.mark.few(2)
@pytest.mark.parametrize(("num_stages", "schedule"), [(1, "gpipe"), (2, "1f1b"), (2, "gpipe"), (4, "1f1b")])
def test_losses_are_those_of_undivided_training_wherever_layers_move(run_ranks, tmp_path, num_stages, schedule):
    config = config_of(tmp_path, straggler=STRAGGLER, pipeline={"schedule": schedule})
    first, *others = run_ranks(lambda rank, group: trained(config, group), num_stages)
    losses, validation_loss = undivided(config)
    assert losses_of(tmp_path) == same(losses)
    assert all(one["validation_loss"] == same(validation_loss) for one in (first, *others))
    moves = [one for one in read_json_lines(tmp_path / "pipeline.jsonl") if one["kind"] == "move"]
    assert first["moves"] == len(moves) == (1 if num_stages > 1 else 0)
    for move in moves:
        assert move["step"] > 3 and move["after"][1] < move["before"][1]
        assert tuple(move["after"]) == first["boundaries"] == others[-1]["boundaries"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (1, 4), (2, 1)])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened_on_any_number_of_stages(run_ranks, tmp_path, before, after):
    sections = {"straggler": STRAGGLER, "output": {"save_every": 5}}
    half = config_of(tmp_path, training={"steps": 11}, **sections)
    (tmp_path / "checkpoints" / "step-00000003.tmp").mkdir(parents=True)  # as a kill may leave it
    first = run_ranks(lambda rank, group: trained(half, group), before)[0]
    whole = config_of(tmp_path, **sections)
    second = run_ranks(lambda rank, group: trained(whole, group, resume=True), after)[0]
    losses, validation_loss = undivided(whole)
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))  # 11 was trained again
    assert losses_of(tmp_path) == same(losses) and second["validation_loss"] == same(validation_loss)
    if before == after:
        assert tuple(lines[10]["boundaries"]) == first["boundaries"] != (0, 4, 8)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000005", "step-00000010"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("stages", [(2, 2), (2, 3)])
def test_a_line_tells_the_mean_of_all_its_steps_also_of_those_before_a_resume(run_ranks, tmp_path, stages):
    """The checkpoint is of step 6, and lines are of steps 4, 8 and 12."""

    def run(rank, group, config, resume=False):
        keep_time()
        step_clock.time = pace.time
        run = prepare(config, text_of(), group, resume=resume)
        with run.held:
            train(run)

    sections = {"balance": {"mode": "off"}, "output": {"save_every": 6}}
    training = {"log_every": 4, "steps": 12}
    whole = config_of(tmp_path / "whole", training=training, **sections)
    run_ranks(run, stages[0], whole)
    half, rest = (
        config_of(tmp_path / "resumed", training=training | {"steps": steps}, **sections) for steps in (7, 12)
    )
    run_ranks(run, stages[0], half)
    run_ranks(run, stages[1], rest, True)
    expected, resumed = (read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed"))
    assert [line["step"] for line in resumed] == [4, 8, 12]
    for line, of_whole in zip(resumed, expected, strict=True):
        assert line["loss"] == same(of_whole["loss"])
    state = json.loads((tmp_path / "resumed" / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert state["unwritten"]["seconds"] == same([expected[1]["step_s"]] * 2)  # two of the four steps
    if stages[0] == stages[1]:  # the other two were slowed by one forward, by which a new process finds shapes
        assert resumed[1]["step_s"] == pytest.approx(expected[1]["step_s"], rel=0.05)
        assert resumed[1]["bubble_ratio"] == pytest.approx(expected[1]["bubble_ratio"], rel=0.05)


def test_what_balancing_has_learned_is_resumed(run_ranks, tmp_path):
    config = config_of(tmp_path, straggler=STRAGGLER, output={"save_every": 10})

    def both(rank, group):
        trained(config, group)
        run = prepare(config, text_of(), group, resume=True)
        with run.held:
            return run.balancer.state_dict(), run.step

    state, step = run_ranks(both, 2)[1]
    saved = json.loads((tmp_path / "checkpoints" / "step-00000010" / "state.json").read_text())
    assert step == 10 and json.loads(json.dumps(state)) == saved["balancer"]
    values = state["state"][0]
    assert values["rebalancing"]["costs"] and values["steps"] == 10


def test_boundaries_that_a_user_has_changed_since_are_taken(run_ranks, tmp_path):
    balance, output = {"mode": "off"}, {"save_every": 2}
    before = config_of(tmp_path, training={"steps": 2}, balance=balance, output=output)
    after = config_of(
        tmp_path, training={"steps": 4}, balance=balance, output=output, pipeline={"boundaries": [0, 7, 8]}
    )

    def both(rank, group):
        return trained(before, group)["boundaries"], trained(after, group, resume=True)["boundaries"]

    assert run_ranks(both, 2)[0] == ((0, 4, 8), (0, 7, 8))


def test_stages_that_divide_parameters_evenly(run_ranks, tmp_path):
    config = config_of(
        tmp_path, model={"vocabulary": 1000}, training={"steps": 1}, pipeline={"boundaries": "parameters"}
    )
    boundaries = run_ranks(lambda rank, group: trained(config, group), 3)[0]["boundaries"]
    sizes = [num_parameters(layer) for layer in build_layers(config, config.make_case())]
    of_stages = [sum(sizes[begin:end]) for begin, end in itertools.pairwise(boundaries)]
    assert max(of_stages) == sizes[-1] < sum(sizes[-2:])  # the head alone is the largest stage that there must be


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"hidden_size": 16}}, "of another layout (model differ), nothing was loaded"),
        ({"training": {"dtype": "float32"}}, "of another layout (dtype differ)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(run_ranks, tmp_path, changed, message):
    config = config_of(tmp_path, training={"steps": 1}, output={"save_every": 1})
    other = config_of(tmp_path, output={"save_every": 1}, **changed)

    def both(rank, group):
        trained(config, group)
        with pytest.raises(ValueError) as refused:
            prepare(other, text_of(), group, resume=True)
        return str(refused.value)

    for said in run_ranks(both, 2):
        assert message in said and "--output" in said


def test_an_earlier_run_is_not_overwritten_and_ranks_must_agree(run_ranks, tmp_path):
    config = config_of(tmp_path, training={"steps": 1})

    def check(rank, group):
        said = []
        for text in (text_of(seed=rank), text_of()):
            with pytest.raises(ValueError) as refused:
                prepare(config, text, group, resume=False)
            said.append(str(refused.value))
        return said

    (tmp_path / "metrics.jsonl").touch()
    for differ, earlier in run_ranks(check, 2):
        assert "do not agree on the text to train on; those that do: [[0], [1]]" in differ
        assert f"{tmp_path} holds an earlier run: add --resume" in earlier


@pytest.mark.parametrize("step_that_fails", ["save", "write_manifest"])
def test_a_save_that_fails_leaves_the_one_before_and_training_goes_on(
    run_ranks, tmp_path, monkeypatch, step_that_fails
):
    config = config_of(tmp_path, training={"steps": 4}, output={"save_every": 2, "keep": 1})

    def check(rank, group):
        fails = checkpoints.dcp if step_that_fails == "save" else checkpoints
        works, calls = getattr(fails, step_that_fails), []

        def failing(*arguments, **options):
            calls.append(1)
            if len(calls) == 2 and step_that_fails == "save":
                (options["storage_writer"].path / "half").touch()
                raise checkpoints.CheckpointException("", {1: (OSError("disk full"), None)})
            if len(calls) == 2:
                raise OSError("disk full")
            return works(*arguments, **options)

        monkeypatch.setattr(fails, step_that_fails, failing)
        return trained(config, group)["steps"]

    assert run_ranks(check, 2) == [4, 4]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["__1_0.distcp", "state.json", ".metadata", "manifest.json"])
def test_a_damaged_or_missing_file_is_named_with_a_way_out(run_ranks, tmp_path, name):
    config = config_of(tmp_path, training={"steps": 4}, output={"save_every": 2})

    def check(rank, group):
        trained(config, group)
        path = tmp_path / "checkpoints" / "step-00000004" / name
        if rank == 0:
            path.write_bytes(path.read_bytes()[:-3] + b"abc") if name != "manifest.json" else path.unlink()
        with pytest.raises(ValueError) as refused:
            prepare(config, text_of(), group, resume=True)
        return str(refused.value)

    for said in run_ranks(check, 2):
        assert name in said and "goes on from step-00000002" in said


def test_layers_are_measured_in_the_two_steps_after_their_work_has_changed(run_ranks, tmp_path, monkeypatch):
    config = config_of(tmp_path, balance={"profile_every": 100})

    def check(rank, group):
        measured = []
        enter = LayerProfiler.__enter__
        monkeypatch.setattr(DynamicCase, "after_step", lambda own, pipeline, optimizer, step, loss: step in (4, 5))
        keep_time()
        run = prepare(config, text_of(), group, resume=False)
        monkeypatch.setattr(LayerProfiler, "__enter__", lambda own: measured.append(run.step) or enter(own))
        with run.held:
            train(run)
        return measured

    assert run_ranks(check, 2) == [[2, 5, 6, 7]] * 2


def test_figures_of_a_case_are_the_mean_of_the_stages_that_have_them_in_training(run_ranks, tmp_path, monkeypatch):
    config = config_of(tmp_path, training={"steps": 2, "validate_every": 1})

    def figures(case, pipeline):
        embedding = pipeline.layers[0]
        figures_here = {"stage": float(pipeline.stage), "seen": embedding.seen if pipeline.stage == 0 else 0.0}
        return figures_here | ({"first": 5.0} if pipeline.stage == 0 else {})

    def see(embedding, *_):
        embedding.seen = 8.0 if embedding.training else 2.0

    def check(rank, group):
        embedding = DynamicCase.embedding
        monkeypatch.setattr(DynamicCase, "figures", figures)
        monkeypatch.setattr(DynamicCase, "embedding", lambda own: watched(embedding(own)))
        return trained(config, group)["figures"]

    def watched(embedding):
        embedding.register_forward_hook(see)
        return embedding

    assert run_ranks(check, 2) == [{"stage": 0.5, "seen": 4.0, "first": 5.0}] * 2
