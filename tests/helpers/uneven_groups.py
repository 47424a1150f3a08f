"""Groups of ranks by their χ: busy times of which 0.2 are no multiplications, and what a division makes of them."""

from hypothesis import strategies as st

from zeroresize.policy.tensor.cost_model import MigrationCost, ResizingCost
from zeroresize.policy.tensor.times import RankTimes

LINEAR = ResizingCost.linear(0.9)
#: Half the columns take .6 of the time, gathering takes up to 20 ms.
REALISTIC = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))
FREE = MigrationCost()


def rank(chi, cost=LINEAR, rest_s=0.2, gemm_s=0.8):
    return RankTimes(rest_s, chi * gemm_s, 1.0, cost)


def group(*chis, cost=LINEAR):
    return [rank(chi, cost) for chi in chis], [chi > 1 for chi in chis]


def balanced_s(times):
    """The least t with Σ max(0, (t − R) / M) = e, which no way of handing over products beats (T* in closed form).

    Found by halving, where columns cost their share and no more.
    """
    low_s, high_s = 0.0, max(rank.busy_s for rank in times)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        done = sum(max(0.0, (middle_s - rank.rest_s) / rank.gemm_s) for rank in times)
        low_s, high_s = (middle_s, high_s) if done < len(times) else (low_s, middle_s)
    return high_s


def pruned_share(division):
    return sum(division.pruned) / len(division.pruned)


def step_s(times, division, migration=FREE):
    return max(division.busy_s(times)) + migration.seconds(division.lent)


groups = st.lists(st.sampled_from([1.0, 1.0, 1.3, 2.0, 4.0, 8.0]), min_size=2, max_size=8).filter(
    lambda chis: 1.0 in chis
)
migrations = st.builds(MigrationCost, st.floats(0, 0.3), st.floats(0, 1))
