"""A check of parallel training names each fault, planted or a host's, rightly, and nothing where none is."""

import re

import colossalai_cases
import dtensor_cases
import faults_of_colossalai
import faults_of_transformers
import plain_cases
import pytest
import transformers_cases

import zeroresize as zr

#: Models are computed some fifty times for each case, which takes minutes: `make test-slow` runs them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


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


HOSTS = pytest.mark.parametrize(
    "cases",
    [
        pytest.param(plain_cases.CASES, id="plain"),
        pytest.param(dtensor_cases.CASES, id="DTensor"),
        pytest.param(transformers_cases.CASES, id="transformers", marks=pytest.mark.transformers),
        pytest.param(faults_of_transformers.CASES, id="transformers itself", marks=pytest.mark.hosts),
    ],
)
COLOSSALAI = pytest.mark.parametrize(
    "cases", [colossalai_cases.CASES, faults_of_colossalai.CASES], ids=["planted", "itself"]
)


@HOSTS
def test_faults_are_named_rightly_and_sound_twins_not_at_all(run_ranks, cases):
    assert_named_rightly(run_ranks, cases)


@COLOSSALAI
@pytest.mark.usefixtures("colossalai_module")
def test_so_they_are_named_of_colossalai(run_ranks, cases):
    assert_named_rightly(run_ranks, cases)
