"""Other kernels than plain torch: who computes what, and that a fused one is measured as soundly as the reference."""

import dataclasses
import sys

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.processes import instances_of
from helpers.virtual_training import FEATURES, Pair, Run

from zeroresize import kernels
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.kernels import reference
from zeroresize.kernels.probe import Probes, ProductProbe
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.utils.extras import MissingExtra


def in_one_piece(kernel):
    """The same values, computed without showing the multiplication to anybody."""

    def fused(*operands):
        *operands, _ = operands
        return kernel(*operands, lambda multiply, *matrices: multiply(*matrices))

    return fused


FUSED = kernels.Implementation(
    "fused",
    in_one_piece(reference.forward),
    in_one_piece(reference.dgrad),
    in_one_piece(reference.dgrad_by_columns),
    in_one_piece(reference.wgrad),
    is_fused=True,
)
#: As a first Triton kernel may be: what it has not, it leaves to the reference.
HALF_FUSED = dataclasses.replace(kernels.REFERENCE, name="half fused", forward=FUSED.forward, is_fused=True)


@pytest.fixture
def registered():
    """``registered(implementation, dtype)`` for the CPU, until the test ends."""
    dtypes = []

    def register(implementation, dtype):
        dtypes.append(dtype)
        kernels.register(implementation, device_type="cpu", dtype=dtype)

    yield register
    for dtype in dtypes:
        kernels.register(kernels.REFERENCE, device_type="cpu", dtype=dtype)


def test_an_implementation_computes_its_own_device_and_dtype_only(registered):
    registered(FUSED, torch.float64)
    assert kernels.implementation_for(torch.empty(1, dtype=torch.float64)) is FUSED
    assert kernels.implementation_for(torch.empty(1, dtype=torch.float32)) is kernels.REFERENCE
    assert kernels.implementation_for(torch.empty(1, dtype=torch.float64, device="meta")) is kernels.REFERENCE
    assert kernels.implementation_on("cpu", torch.float64) is FUSED
    registered(kernels.REFERENCE, torch.float64)
    assert kernels.implementation_for(torch.empty(1, dtype=torch.float64)) is kernels.REFERENCE


def test_a_device_type_that_does_not_exist_is_an_error():
    with pytest.raises(RuntimeError, match="warp"):
        kernels.register(FUSED, device_type="warp", dtype=torch.float64)


def test_where_triton_is_not_installed_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "zeroresize.kernels.triton_products", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'zeroresize\[triton\]'"):
        kernels.use_triton()


class Heard(ProductProbe):
    def __init__(self):
        self.calls = []

    def product_begins(self):
        self.calls.append("product")

    def product_ends(self):
        self.calls.append("end of product")

    def gemm_begins(self, operands):
        self.calls.append("gemm")

    def gemm_ends(self, operands):
        self.calls.append("end of gemm")


@pytest.mark.parametrize("implementation", [kernels.REFERENCE, FUSED], ids=lambda one: one.name)
def test_whoever_does_not_ask_for_more_takes_a_fused_product_for_one_multiplication(registered, implementation):
    registered(implementation, torch.float64)
    heard = Heard()
    x_TK, w_NK = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    y_TN = Probes([heard]).product(kernels.forward, x_TK, w_NK, None, None)
    assert torch.equal(y_TN, torch.nn.functional.linear(x_TK, w_NK))
    assert heard.calls == ["product", "gemm", "end of gemm", "end of product"]


@on_ranks(2)
def test_fused_products_of_a_straggler_are_slowed(rank, group):
    kernels.register(FUSED, device_type="cpu", dtype=torch.float64)
    model = Pair(group).double()
    slowed = {}
    for scope in ("gemm", "all"):
        slow = SlowLayers([model.up, model.down], scope)
        slow.chi = 2.0
        with slow:
            model(torch.randn(8, FEATURES, dtype=torch.float64)).sum().backward()
        slowed[scope] = slow.num_products
    assert slowed == {"gemm": 5, "all": 15}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("implementation", [FUSED, HALF_FUSED], ids=lambda one: one.name)
@pytest.mark.parametrize("mode", ["zero-rd", "mig"])
def test_a_fused_kernel_trains_bitwise_alike_and_is_balanced_alike(run_ranks, implementation, mode):
    """The straggler is found, relieved as much as with kernels that show their multiplication, and let go again."""

    def train(rank, group, name):
        if name != "reference":
            kernels.register(implementation, device_type="cpu", dtype=torch.float64)
        # Fast enough for the calibration to take all tokens; it also takes dx of every layer, as training does then.
        with instances_of(RankMonitor) as monitors:
            run = Run(group, gather_s=4e-5, chi={0: 0.02, 1: 0.08}, model=lambda group: Pair(group).double(), mode=mode)
        run.x = run.x.double().requires_grad_()
        losses, shares, measured = [], [], []
        for update in range(16):
            if update == 8:
                run.time.chi = 0.02
            losses += run.steps(run.config.update_every)
            shares.append([(own.pruned, own.lent) for own in run.balancer.plan.ranks])
            times = monitors[0].times
            measured += [times.busy_s, times.gemm_s, times.gather_fill_scale] if update < 8 else []
        return losses, shares, measured

    plain, fused = run_ranks(train, 2, "reference"), run_ranks(train, 2, implementation.name)
    for run, expected in zip(fused, plain, strict=True):
        losses, shares, measured = run
        assert losses == expected[0]
        assert shares == [[pytest.approx(rank) for rank in update] for update in expected[1]]
        assert measured == pytest.approx(expected[2], rel=1e-5)
    spared = [sum(update[1]) for update in plain[0][1]]
    assert spared[7] > 0.3 and spared[-1] == 0.0
