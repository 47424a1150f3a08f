"""A check of parallel training names each planted fault rightly, and nothing where none is."""

import re

import colossalai_cases
import dtensor_cases
import plain_cases
import pytest
import transformers_cases
from planted_faults import FAULT, ROUNDING, measured

import zeroresize as zr

#: Models are computed some fifty times for each case, which takes minutes: `make test-all` runs them.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(400)]


def errors_of(run_ranks, cases):
    """By name of a case, the largest error of each measure over two ranks."""

    def measure(rank, group):
        return {case.name: measured(case.make(rank, group), group) for case in cases}

    by_rank = run_ranks(measure, 2, timeout_s=300)
    return {name: {key: max(item[name][key] for item in by_rank) for key in by_rank[0][name]} for name in by_rank[0]}


def assert_wrong_and_sound(run_ranks, cases):
    """Each planted fault is one, and each sound twin computes what the undivided model does."""
    errors = errors_of(run_ranks, cases)
    for case in cases:
        figures = errors[case.name]
        if case.is_sound:
            assert max(figures.values()) < ROUNDING[case.host], (case.name, figures)
        else:
            assert figures[case.seen_in] > FAULT, (case.name, figures)


def assert_named_rightly(run_ranks, cases):
    def check(rank, group):
        findings = {}
        for case in cases:
            made = case.make(rank, group)
            findings[case.name] = zr.check_parallel(made.model, made.batch, made.loss, **made.kwargs)
        return findings

    by_rank = run_ranks(check, 2, timeout_s=300)
    assert by_rank[0] == by_rank[1], "ranks say different things"
    for case in cases:
        findings = by_rank[0][case.name]
        if case.is_sound:
            assert findings == [], (case.name, findings)
            continue
        assert findings, case.name
        for finding in findings:
            assert finding.cause in case.causes, (case.name, finding)
            named = [re.sub(r"^(module\.)+", "", item) for item in (finding.parameter or finding.layer,) if item] or [
                ""
            ]
            assert all(
                any(item == name or (name and item.startswith(name)) for name in case.names) for item in named
            ), (
                case.name,
                finding,
            )
            assert finding.detail and finding.remedy, (case.name, finding)


TORCH = pytest.mark.parametrize("cases", [plain_cases.CASES, dtensor_cases.CASES], ids=["plain", "DTensor"])


@TORCH
def test_planted_faults_are_faults_and_sound_twins_compute_what_the_undivided_model_does(run_ranks, cases):
    assert_wrong_and_sound(run_ranks, cases)


@pytest.mark.transformers
def test_so_they_are_of_transformers(run_ranks):
    assert_wrong_and_sound(run_ranks, transformers_cases.CASES)


@pytest.mark.usefixtures("colossalai_module")
def test_so_they_are_of_colossalai(run_ranks):
    assert_wrong_and_sound(run_ranks, colossalai_cases.CASES)


@TORCH
def test_faults_are_named_rightly_and_sound_twins_not_at_all(run_ranks, cases):
    assert_named_rightly(run_ranks, cases)


@pytest.mark.transformers
def test_faults_of_transformers_are_named_rightly(run_ranks):
    assert_named_rightly(run_ranks, transformers_cases.CASES)


@pytest.mark.usefixtures("colossalai_module")
def test_faults_of_colossalai_are_named_rightly(run_ranks):
    assert_named_rightly(run_ranks, colossalai_cases.CASES)
