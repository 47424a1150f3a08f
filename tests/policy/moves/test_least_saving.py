"""What saves less than a share of a step is noise."""

from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.moves.least_saving import beyond_noise, is_saving

STEPS, SHARES = st.floats(1e-3, 100.0), st.floats(0.0, 0.5)


@given(STEPS, SHARES, st.floats(1.01, 100.0))
def test_more_than_the_share_counts_and_a_loss_never_is_a_saving(step_s, least, times):
    noise_s = least * step_s
    assert not is_saving(noise_s, step_s, least) and not is_saving(-times * noise_s, step_s, least)
    assert is_saving(times * noise_s + 1e-6, step_s, least)


@given(st.floats(-10.0, 10.0), STEPS, SHARES)
def test_losses_count_as_savings_do(saving_s, step_s, least):
    counted_s = beyond_noise(saving_s, step_s, least)
    assert counted_s == -beyond_noise(-saving_s, step_s, least)
    assert counted_s == (saving_s if is_saving(saving_s, step_s, least) or is_saving(-saving_s, step_s, least) else 0.0)
