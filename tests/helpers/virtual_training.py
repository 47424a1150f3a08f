"""Training on real ranks with a clock that counts multiplications, and time that passes only when told."""

from __future__ import annotations

import types

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.kernels.probe import ProductProbe
from zeroresize.measure import calibration, clocks, step_timer, timed_products
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.times import RankTimes

FEATURES = 48


class VirtualTime(ProductProbe):
    """A clock that only products move: χ × FLOPs a multiplication, and ``gather_s`` where columns are gathered."""

    def __init__(self, gather_s):
        self.now, self.chi, self.gather_s = 0.0, 1.0, gather_s
        self._is_resized = self._has_multiplied = False

    def perf_counter(self):
        return self.now

    def product_begins(self):
        self._has_multiplied = False

    def whole_begins(self, operands):
        pass

    def gemm_ends(self, operands):
        self._has_multiplied = True
        left, right = operands[:2]
        self._is_resized = {left.shape[-1], right.shape[-1]}.isdisjoint({FEATURES, 2 * FEATURES, 4 * FEATURES})
        outputs = right.shape[0] if left.shape[-1] == right.shape[-1] else right.shape[-1]
        self.now += self.chi * left.numel() * outputs * 1e-6

    def whole_ends(self, operands):
        """A fused product takes as long as one that is gathered, multiplied and filled in turn."""
        if self._has_multiplied:  # by the reference, to which the fused kernel left it
            return
        left, right = operands[:2]
        plan = next((operand for operand in operands if isinstance(operand, LayerPlan)), None)
        self._is_resized = plan is not None and left.shape[-1] != right.shape[0]  # not of dx, as above
        outputs = right.shape[0] if left.shape[-1] == right.shape[-1] else right.shape[-1]
        work = left.numel() * outputs
        if plan is not None:
            work = work * plan.keep_P.numel() // plan.num_columns
        self.now += self.chi * work * 1e-6

    def product_ends(self):
        self.now += self.gather_s if self._is_resized else 0.0


def keep_time(time, layers):
    """What balancing measures of these layers, converted already, it reads off this clock from now on."""
    for module in (clocks, step_timer, timed_products, calibration):
        module.time = types.SimpleNamespace(perf_counter=time.perf_counter)
    calibration.ROUNDS = timed_products.ROUNDS = 1  # all would take equally long
    for layer in layers:
        layer.probes.add_innermost(time)


class Pair(nn.Module):
    """Column-parallel, GELU, row-parallel: what a transformer's feed-forward part is."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        up, down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
        self.up = zr.ColumnParallelLinear.from_linear(up, process_group=group)
        self.down = zr.RowParallelLinear.from_linear(down, process_group=group)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Run:
    """A model in training whose time is virtual.

    Args:
        chi: χ of this process's rank by its number in the whole job; 1 of those that it does not name.
        model: what it trains, made of the group.
    """

    def __init__(self, group, gather_s=0.001, on_update=None, chi=None, model=Pair, **config):
        still = {"moves": False} if config.get("mode") == "semi" else {}  # tests of moving ask for it
        self.config = zr.BalanceConfig(**{"mode": "zero-rd", "update_every": 3, **still, **config})
        self.time = VirtualTime(gather_s)
        self.time.chi = (chi or {}).get(dist.get_rank(), 1.0)
        self.model = zr.convert(model(group), process_group=group)
        keep_time(self.time, balanced_layers(self.model).values())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.balancer = zr.Balancer(
            self.model, self.optimizer, process_group=group, config=self.config, on_update=on_update
        )
        self.x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1))

    def steps(self, number):
        """Losses of so many training steps."""
        losses = []
        for _ in range(number):
            self.time.now += 0.01  # what is not a product
            loss = self.model(self.x).square().mean()
            loss.backward()
            self.reduce_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.balancer.step()
            losses.append(loss.item())
        return losses

    def reduce_gradients(self):
        """What happens to gradients between backward and the optimizer's step."""

    def updates(self, number):
        """γ of every rank after each update."""
        trace = []
        for _ in range(number):
            self.steps(self.config.update_every)
            trace.append([rank.pruned for rank in self.balancer.plan.ranks])
        return trace

    def pruned(self):
        return {name: self.balancer.lineage.pruned(name, "w") for name in ("up", "down")}


class FakeTime:
    """A clock that only moves when told, and a sleep that ends late."""

    def __init__(self, overshoot_s=0.0):
        self.now_s = 0.0
        self.overshoot_s = overshoot_s
        self.sleeps = []

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now_s += seconds + self.overshoot_s


class FakeClock:
    """Time that stands still but for ``advance``; marks pass when the test says so, as device events do."""

    is_immediate = False

    def __init__(self):
        self.now = 0.0
        self.passed = float("inf")
        self.on_main_stream = True
        self.recycled = []

    def advance(self, seconds):
        self.now += seconds

    def mark(self):
        return self.now

    def seconds(self, begin, end):
        return end - begin

    def has_passed(self, mark):
        return mark <= self.passed

    def enter_main_stream(self):
        pass

    def is_on_main_stream(self):
        return self.on_main_stream

    def recycle(self, *marks):
        self.recycled += marks


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
