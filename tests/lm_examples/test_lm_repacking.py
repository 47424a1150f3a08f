"""A GPT goes on with fewer ranks in a running job, with the losses of undivided training."""

import pytest
from helpers.language_models import config_of, losses_of, trained, undivided

from zeroresize.utils.json_lines import read_json_lines


def test_ranks_leave_and_the_losses_are_those_of_undivided_training(run_ranks, tmp_path):
    releases = tmp_path / "releases"
    releases.mkdir()
    command = ["sh", "-c", f"echo gone > {releases}/{{rank}}"]
    repack = {"mode": "on", "max_slowdown": 10.0, "least_stages": 2, "release_command": command}
    config = config_of(tmp_path / "run", repack=repack)
    first, second, third = run_ranks(lambda rank, group: trained(config, group), 3)
    losses, validation_loss = undivided(config)
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-10, abs=0.0)
    assert first["validation_loss"] == pytest.approx(validation_loss, rel=1e-10, abs=0.0)
    assert len(first["boundaries"]) == 3 and first["steps"] == second["steps"] == config.training.steps
    assert third == {}
    assert [one.name for one in releases.iterdir()] == ["2"]
    moves = [one for one in read_json_lines(tmp_path / "run" / "pipeline.jsonl") if one["kind"] == "move"]
    assert [len(one["before"]) - len(one["after"]) for one in moves].count(1) == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"repack": {"mode": "on"}}, "needs balance.memory_limits or repack.max_slowdown"),
        ({"repack": {"mode": "on", "max_slowdown": 1.0}, "balance": {"mode": "off"}}, "goes with balance.mode=on"),
        ({"repack": {"release_command": "rm"}}, "a list of words is needed"),
    ],
)
def test_what_cannot_release_ranks_is_refused(tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **sections)
