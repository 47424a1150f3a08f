"""What hosts themselves train wrong without a word: it is so, and a check names it."""

import pytest
from test_check_parallel import assert_named_rightly, assert_wrong_and_sound

#: Models are computed some fifty times for each case, which takes minutes: `make test-all` runs them.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(400)]


@pytest.mark.usefixtures("colossalai_module")
def test_colossalai_computes_otherwise_than_the_undivided_model(run_ranks):
    import faults_of_colossalai

    assert_wrong_and_sound(run_ranks, faults_of_colossalai.CASES)


@pytest.mark.hosts
def test_transformers_5_and_peft_compute_otherwise_than_the_undivided_model(run_ranks):
    import faults_of_transformers

    assert_wrong_and_sound(run_ranks, faults_of_transformers.CASES)


@pytest.mark.usefixtures("colossalai_module")
def test_faults_of_colossalai_itself_are_named_rightly(run_ranks):
    import faults_of_colossalai

    assert_named_rightly(run_ranks, faults_of_colossalai.CASES)


@pytest.mark.hosts
def test_faults_of_transformers_5_and_peft_are_named_rightly(run_ranks):
    import faults_of_transformers

    assert_named_rightly(run_ranks, faults_of_transformers.CASES)
