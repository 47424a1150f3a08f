"""A model with a setting that its host trains wrong gets one line, and one without gets none."""

import sys
import time
from pathlib import Path

import pytest
from helpers.processes import caught_log_lines

from zeroresize.integrations.known_faults import _FAULTS, warn_of_known_faults
from zeroresize.resharding.data_parallel import unwrap

sys.path.append(str(Path(__file__).parents[1] / "checks"))
#: By the beginning of a case's name, what its line says.
SAID = {
    "bert drops": "drops replicated activations otherwise on each rank: set its p to 0",
    "gpt2 drops": "drops replicated activations otherwise on each rank: set its p to 0",
    "gpt2 for language": "lets tokens see later ones",
    "llama sees later tokens under split": "lets tokens see later ones",
    "llama sees later tokens under all": "lets tokens see later ones",
    "llama under split gather with a padded row": "lets tokens see later ones",  # of the batch the model knows nothing
    "bert never": "a gradient of this rank's tokens only",
    "gpt2 counts": "clip by zr.clip_grad_norm_",
    "qwen3 sums": "run one backward a step",
    "what peft saves": "never trains",
}


def lines_of(run_ranks, cases):
    """By case, what is said at the first call, at a second one, and how long a call takes, in seconds."""

    def say(rank, group):
        result = {}
        for case in cases:
            made = case.make(rank, group)
            model, optimizer = unwrap(made.model), made.kwargs.get("optimizer")
            with caught_log_lines() as first:
                warn_of_known_faults(model, optimizer)
            with caught_log_lines() as second:
                started = time.perf_counter()
                warn_of_known_faults(model, optimizer)
            result[case.name] = list(map(str, first)), list(map(str, second)), time.perf_counter() - started
        return result

    return run_ranks(say, 2)[0]


def assert_said(lines, cases):
    assert min(seconds for *_, seconds in lines.values()) < 0.01
    for case in cases:
        first, second, _ = lines[case.name]
        said = next((text for start, text in SAID.items() if case.name.startswith(start)), None)
        assert second == [] and len(first) == (said is not None), (case.name, first)
        assert said is None or said in first[0], (case.name, first)


@pytest.mark.slow
@pytest.mark.usefixtures("colossalai_module")
def test_colossalai(run_ranks):
    from colossalai_cases import CASES as SOUND
    from faults_of_colossalai import CASES

    cases = [*CASES, *(case for case in SOUND if case.is_sound)]
    assert_said(lines_of(run_ranks, cases), cases)


@pytest.mark.hosts
def test_transformers_and_peft(run_ranks):
    from faults_of_transformers import CASES
    from transformers_cases import CASES as SOUND

    cases = [*CASES, *(case for case in SOUND if case.is_sound)]
    assert_said(lines_of(run_ranks, cases), cases)


def test_versions_in_which_nothing_was_seen_match_none():
    for package, later in {"colossalai": "0.5.1", "transformers": "5.25.0", "peft": "0.22.0"}.items():
        versions = [start for name, start, *_ in _FAULTS if name == package]
        assert versions and not any(later.startswith(start) for start in versions)
