"""What balancing tells: records in files that others can read, at any time and after any end."""

import dataclasses
import json
import math

import pytest
from helpers.faults import files_of_at_most
from helpers.virtual_training import FEATURES, Run

from zeroresize.config.keys import MIGRATING_MODES, MODES, MOVING_MODES
from zeroresize.telemetry import JsonLinesTelemetry, TensorBoardTelemetry, UpdateRecord
from zeroresize.utils.files import read_json_lines

FIELDS = {"format", *(field.name for field in dataclasses.fields(UpdateRecord))}


def record(**changes):
    values = {"update": 2, "step": 20, "epoch": 1, "rank": 3, "busy_s": 0.25, "gemm_s": 0.125, "is_straggler": True}
    values |= {"ratio": 0.5, "pruned": 0.4375, "lent": 0.0, "borrowed": 0.25, "lent_to": {}, "calibration_steps": 0}
    values |= {"layer_shares": {"up": 0.5, "down": 0.375}, "predicted_step_s": 0.2, "balancing_since_update_s": 0.001}
    values |= {"would": {"zero-rd": {"predicted_step_s": 0.2, "gain": 0.25, "most_ratio": 0.5}}}
    return UpdateRecord(**{**values, **changes})


def records_of_steps(*steps):
    return [record(step=step, update=step // 10) for step in steps]


def write(path, records, **arguments):
    telemetry = JsonLinesTelemetry(path, **arguments)
    for record in records:
        telemetry(record)
    telemetry.close()


def steps_in(path):
    return [one["step"] for one in read_json_lines(path)]


# ---- JSON lines -----------------------------------------------------------------------------------------------------


def no_such_number(text):
    raise AssertionError(f"{text} is not JSON")


def test_an_update_is_a_line_of_json_with_every_field_that_can_be_read_at_once(tmp_path):
    """What was not measured is null, at any depth."""
    path = tmp_path / "folder" / "balance.jsonl"
    measured = {"bound_s": 0.19, "products_bound_s": 0.18, "moving_rest": 0.2}
    records = [record(**measured), record(**measured, update=3, step=30)]
    telemetry = JsonLinesTelemetry(path)
    assert read_json_lines(path) == []
    for number, written in enumerate(records):
        telemetry(written)
        assert len(read_json_lines(path)) == number + 1
    telemetry(record(busy_s=math.nan, would={"zero-rd": {"most_ratio": 0.0, "predicted_step_s": math.nan}}))
    telemetry.close()
    *lines, unknown = [json.loads(line, parse_constant=no_such_number) for line in path.read_text().splitlines()]
    assert lines == [{"format": 1, **dataclasses.asdict(one)} for one in records]
    assert set(unknown) == FIELDS and unknown["busy_s"] is unknown["bound_s"] is None
    assert unknown["would"] == {"zero-rd": {"most_ratio": 0.0, "predicted_step_s": None}}


@pytest.mark.parametrize("part_that_fits", [0, 40])
def test_a_disk_that_is_full_ends_no_training_and_leaves_whole_lines(tmp_path, caplog, part_that_fits):
    path = tmp_path / "balance.jsonl"
    telemetry = JsonLinesTelemetry(path)
    first, second, third, fourth = records_of_steps(10, 20, 30, 40)
    telemetry(first)
    with files_of_at_most(path.stat().st_size + part_that_fits):
        telemetry(second)
        assert steps_in(path) == [10] and path.read_text().endswith("}\n")
        telemetry(third)
    telemetry(fourth)
    telemetry.close()
    assert steps_in(path) == [10, 40]
    (line,) = caplog.messages
    assert line.startswith(f"telemetry in {path} is incomplete from step 20 on: ")


def test_what_is_no_record_is_named_and_stays(tmp_path):
    path = tmp_path / "balance.jsonl"
    for line in ('{"epoch": 1}', '{"step": "10"}', '{"step": null}'):
        path.write_text(f'{{"step": 10}}\n{line}\n')
        with pytest.raises(
            ValueError, match=r"balance\.jsonl, line 2: expected a number 'step': delete the line, or move"
        ):
            JsonLinesTelemetry(path, from_step=20)
        assert path.read_text().endswith(f"{line}\n"), "nothing was lost"
        JsonLinesTelemetry(path)  # which keeps all
    for damage in ("[" * 100_000 + "\n", "\x00\xff\n", "[1]\n", '{"step": \n'):
        path.write_text(damage, encoding="latin-1")
        with pytest.raises(ValueError, match=r"balance\.jsonl, line 1: expected a JSON object"):
            read_json_lines(path)


def test_a_resumed_run_drops_what_was_never_finished_and_what_an_interrupted_one_wrote_of_later_steps(tmp_path):
    for from_step, kept in ((0, []), (10, [10]), (25, [10, 20]), (None, [10, 20, 30])):
        path = tmp_path / f"from {from_step}"
        write(path, records_of_steps(10, 20, 30))
        write(path, records_of_steps(40), from_step=from_step)
        assert steps_in(path) == [*kept, 40]
    path.write_text(path.read_text()[:-7])
    assert steps_in(path) == [10, 20, 30]
    write(path, records_of_steps(50), from_step=40)
    assert steps_in(path) == [10, 20, 30, 50]
    assert read_json_lines(tmp_path / "never written") == []


# ---- in training ----------------------------------------------------------------------------------------------------


def test_records_in_training_agree_with_metrics_and_the_lineage_table(run_ranks, tmp_path):
    def train(rank, group):
        telemetry = JsonLinesTelemetry(tmp_path / f"rank{rank}.jsonl")
        seen = []

        def on_update(record):
            telemetry(record)
            columns = {name: getattr(run.model, name).num_columns for name in run.pruned()}
            shares = {name: 0.0 if p is None else len(p) / columns[name] for name, p in run.pruned().items()}
            seen.append((run.balancer.metrics(), shares))

        run = Run(group, chi={1: 4.0}, on_update=on_update, mode="zero-pridiff", iters_per_epoch=6)
        run.updates(5)
        return seen

    results = run_ranks(train, 2)
    records = [read_json_lines(tmp_path / f"rank{rank}.jsonl") for rank in range(2)]
    for rank, (seen, lines) in enumerate(zip(results, records, strict=True)):
        assert [(one["update"], one["step"], one["rank"]) for one in lines] == [(n, 3 * n, rank) for n in range(1, 6)]
        for line, (metrics, shares) in zip(lines, seen, strict=True):
            assert set(line) == FIELDS and line["would"] == {}
            assert not any(name.startswith(("watch/", "balance/would/")) for name in metrics)
            for name in ("ratio", "busy_s", "gemm_s", "is_straggler"):
                assert line[name] == metrics[f"balance/{name}"]
            assert line["layer_shares"] == shares
        assert [one["epoch"] for one in lines] == [0, 1, 1, 2, 2], "an epoch of six steps, an update each third"
    normal, straggler = (told[-1] for told in records)
    assert normal["ratio"] == 0.0 and straggler["ratio"] > 0.5
    assert straggler["layer_shares"]["up"] != straggler["layer_shares"]["down"]
    assert straggler["predicted_step_s"] == normal["predicted_step_s"]


def test_off_tells_what_every_mode_would_do_and_does_nothing(run_ranks, tmp_path):
    def train(rank, group):
        run = Run(group, chi={1: 4.0}, on_update=JsonLinesTelemetry(tmp_path / f"rank{rank}.jsonl"), mode="off")
        run.updates(5)
        return run.pruned(), run.balancer.metrics(), run.balancer.what_if()

    results = run_ranks(train, 2)
    for rank, (pruned, metrics, what_if) in enumerate(results):
        assert "watch/num_slow" in metrics, "by the code of zr.watch, which has its own tests"
        lines = read_json_lines(tmp_path / f"rank{rank}.jsonl")
        assert pruned == {"up": None, "down": None}
        assert all(one["ratio"] == one["pruned"] == 0.0 for one in lines)
        assert all(set(one["layer_shares"].values()) == {0.0} for one in lines)
        assert what_if == results[0][2], "the whole group's, on every rank"
        assert list(what_if) == list(lines[-1]["would"]) == [mode for mode in MODES if mode != "off"]
        for mode, would in what_if.items():
            computed = would["owned"][1] * (1.0 - would["pruned"][1] - would["lent"][1])
            assert would["ratios"] == [0.0, pytest.approx(1.0 - computed)]
            assert mode in MOVING_MODES or would["owned"] == [1.0, 1.0]
            assert would["ratios"][1] > 0.5
            assert mode in MIGRATING_MODES or would["lent"] == [0.0, 0.0]
            assert mode != "mig" or would["pruned"] == [0.0, 0.0]
            full_s, short_s = metrics["balance/predicted_step_s"], would["predicted_step_s"]
            assert would["gain"] == pytest.approx((full_s - short_s) / full_s) and 0.0 < would["gain"] < 1.0
            flat = {"predicted_step_s": short_s, "gain": would["gain"], "most_ratio": would["ratios"][1]}
            assert lines[-1]["would"][mode] == flat
            assert {name: metrics[f"balance/would/{mode}/{name}"] for name in flat} == flat


def test_records_tell_who_owns_what_and_what_changed_hands_since_the_one_before(run_ranks):
    def train(rank, group):
        updates = []
        run = Run(group, on_update=updates.append, mode="off")
        run.updates(1)
        run.balancer.move([3, 1])
        run.updates(1)
        with run.balancer.at_home():
            pass
        run.updates(2)
        return [record.to_dict() for record in updates]

    records = run_ranks(train, 2)
    neuron = 4 * (FEATURES + 1 + FEATURES) * 3  # a row of W1 and of b1, a column of W2; fp32, two moments
    for lines, owned, after in zip(records, (1.5, 0.5), (144, 48), strict=True):
        assert [record["units"] for record in lines] == [{"neurons": 96}] + [{"neurons": after}] * 3
        assert [record["owned"] for record in lines] == pytest.approx([1.0, owned, owned, owned])
        assert [record["moved_bytes"] for record in lines] == [0, 48 * neuron, 2 * 48 * neuron, 0]
        assert [record["moving_s"] > 0 for record in lines] == [False, True, True, False]
    assert [one["moving_s"] for one in records[0]] == [one["moving_s"] for one in records[1]], "of the slowest"


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


def scalars_in(folder):
    """{tag: {step: value}}."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def show(folder, records, **arguments):
    board = TensorBoardTelemetry(folder, **arguments)
    for record in records:
        board(record)
    board.close()


def test_tensorboard_shows_numbers_and_layers_by_step(tmp_path):
    pytest.importorskip("tensorboard")
    show(tmp_path, [record(busy_s=math.nan), record(step=30, ratio=0.25)])
    scalars = scalars_in(tmp_path)
    assert scalars["balance/ratio"] == {20: 0.5, 30: 0.25}
    assert scalars["balance/busy_s"] == {30: 0.25}, "no point where nothing was measured"
    assert scalars["balance_layers/down"] == {20: 0.375, 30: 0.375}


@pytest.mark.parametrize("part_that_fits", [0, 10])
def test_events_that_cannot_be_written_end_no_training_and_cost_no_others(tmp_path, caplog, part_that_fits):
    pytest.importorskip("tensorboard")
    board = TensorBoardTelemetry(tmp_path)
    (file,) = tmp_path.iterdir()
    board(record(step=10))
    with files_of_at_most(file.stat().st_size + part_that_fits):
        board(record(step=20))
        board(record(step=30))
    board(record(step=40))
    board.close()
    (line,) = caplog.messages
    assert line.startswith(f"TensorBoard's {tmp_path} is incomplete from step 20 on: ")
    assert list(scalars_in(tmp_path)["balance/ratio"]) == [10, 40]


def test_ranks_that_are_given_no_record_take_nobodys_file_away(tmp_path):
    path = tmp_path / "status.jsonl"
    path.write_text('{"step": 1}\n')
    writing, idle = (JsonLinesTelemetry(path, from_step=0) for _ in range(2))
    writing(record(step=3))
    idle.close()
    JsonLinesTelemetry(path, from_step=0)
    writing(record(step=4))
    assert [line["step"] for line in read_json_lines(path)] == [3, 4]
