"""Triton's products against the formulas in float64: on the CPU under TRITON_INTERPRET=1, and on a GPU without it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.parallel_layers import plan_keeping
from helpers.resized_products import PRODUCTS, Operands, agree_with_formulas, by_formula, cases, drawn_plan
from hypothesis import given, settings
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from zeroresize import kernels
from zeroresize.kernels import reference
from zeroresize.kernels.probe import Probes
from zeroresize.layers.functional import ProductContext, column_parallel_products
from zeroresize.plan.layer import LayerPlan

triton = pytest.importorskip("triton")
products = pytest.importorskip("zeroresize.kernels.triton_products")
from zeroresize.kernels import triton_tuning  # noqa: E402

IS_INTERPRETED = triton.knobs.runtime.interpret
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(IS_INTERPRETED, reason="needs no TRITON_INTERPRET")
on_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=[pytest.mark.gpu, compiled])]
)


@pytest.fixture(autouse=True)
def fixed(monkeypatch):
    """One configuration, and memory that is full of NaN when it is new."""
    empty = torch.empty

    def poisoned(*size, **options):
        memory = empty(*size, **options)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(products, "fastest", lambda *_: triton_tuning.FIXED)


def on(device, plan):
    """The same plan there."""
    return LayerPlan.from_pruned(plan.pruned, plan.num_columns, device, plan.imputation, plan.lent)


def dtypes_of(device):
    return (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)


@on_devices
@pytest.mark.parametrize(
    ("tokens", "outputs", "plan"),
    [
        pytest.param(37, 21, drawn_plan(53, 40, 5, "zero"), id="odd sizes, lent columns"),
        pytest.param(21, 37, drawn_plan(53, 17, 6, "average"), id="average"),
        pytest.param(33, 5, drawn_plan(90, 9, 60, "same"), id="same, many lent"),
        pytest.param(7, 3, drawn_plan(20, 0, 20, "average"), id="nothing kept"),
        pytest.param(35, 3, drawn_plan(50, 50, 0, "same"), id="all kept"),
        pytest.param(1, 1, drawn_plan(2, 1, 0, "average"), id="least"),
        pytest.param(9, 34, drawn_plan(112, 64, 16, "average", block=16), id="blocks"),
        pytest.param(9, 34, drawn_plan(96, 32, 0, "zero", block=32), id="blocks of 32"),
    ],
)
def test_products_are_those_of_the_formulas_and_read_nothing_else(device, tokens, outputs, plan):
    for dtype in dtypes_of(device):
        agree_with_formulas(products, Operands.random(tokens, outputs, plan, dtype, device), on(device, plan))


@interpreted
@settings(max_examples=4)
@given(cases(most=40))
def test_products_of_any_shape_are_those_of_the_formulas(case):
    tokens, outputs, plan = case
    agree_with_formulas(products, Operands.random(tokens, outputs, plan, torch.float32), plan)


@pytest.mark.gpu
@compiled
@settings(max_examples=200)
@given(cases(most=300))
def test_products_of_any_shape_are_those_of_the_formulas_on_a_gpu(case):
    tokens, outputs, plan = case
    operands = Operands.random(tokens, outputs, plan, torch.bfloat16, "cuda")
    agree_with_formulas(products, operands, on("cuda", plan))


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("config", triton_tuning.CONFIGS, ids=str)
@pytest.mark.parametrize("block", [1, 16, 64])
def test_all_configurations_compute_the_same_on_a_gpu(monkeypatch, config, block):
    monkeypatch.setattr(products, "fastest", lambda *_: config)
    plan = drawn_plan(1024, 576, 128, "average", block=block)
    agree_with_formulas(products, Operands.random(300, 500, plan, torch.bfloat16, "cuda"), on("cuda", plan))


@on_devices
def test_matrices_may_lie_as_they_like(device):
    tokens, outputs, plan = 19, 11, drawn_plan(30, 20, 4, "same")
    operands = Operands.random(tokens, outputs, plan, torch.float32, device)
    operands.lie_as_they_like()
    agree_with_formulas(products, operands, on(device, plan))


@on_devices
def test_sums_are_kept_in_float32(device):
    plan = on(device, drawn_plan(2100, 2099, 0, "zero"))
    x_TK = torch.ones(1, 2100, dtype=torch.float16, device=device)
    assert products.forward(x_TK, x_TK, None, plan, Probes()).item() == 2100  # float16 adds nothing to 2048
    of_single, x_KT = on(device, drawn_plan(1, 1, 0, "zero")), x_TK.t().contiguous()
    assert products.wgrad(x_KT, x_KT, of_single, None, Probes()).item() == 2100


@on_devices
def test_without_last_gradients_of_the_shape_pruned_columns_are_zero(device):
    plan = on(device, drawn_plan(8, 4, 0, "same"))
    operands = Operands.random(3, 5, plan, torch.float32, device)
    for last in (None, torch.ones(2, 8, device=device)):
        dx_TK = products.dgrad(operands.dy_TN, operands.w_NK, plan, last, Probes())
        assert not dx_TK[:, plan.pruned].any() and dx_TK[:, plan.keep_P].all()


@interpreted
@pytest.mark.parametrize("strides", [(2**30 + 2, 1), (1, 2**29)], ids=["rows", "columns"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_matrix_may_have_more_elements_than_int32_counts(tmp_path, product, strides):
    """The last ones lie past 2³¹ elements, in a file that is a hole but for what is written."""
    plan, size = plan_keeping({1, 2, 3, 4}, 6, "same"), 3 + 5 * 2**29
    operands = Operands.random(3, 3, plan, torch.float16)
    for name in ("x_TK", "w_NK", "last_dx_TK", "last_dw_NK"):
        matrix = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.float16)
        matrix = matrix.as_strided((3, 6), strides)
        matrix.copy_(getattr(operands, name))
        setattr(operands, name, matrix)
    result = getattr(products, product)(*operands.of(product, plan), Probes())
    assert_close(result.double(), by_formula(product, operands, plan), rtol=2**-10, atol=2**-14)


def test_what_the_kernels_do_not_take_is_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(products, "fastest", None)
    plan = drawn_plan(6, 4, 0, "zero")
    x_TK, w_NK, dy_TN = (torch.randn(size, dtype=torch.float64) for size in ((3, 6), (2, 6), (3, 2)))
    gemms = []

    def gemm(multiply, *matrices):
        gemms.append(multiply)
        return multiply(*matrices)

    assert torch.equal(products.forward(x_TK, w_NK, None, plan, gemm), reference.forward(x_TK, w_NK, None, plan, gemm))
    assert products.forward(x_TK[:0].float(), w_NK.float(), None, plan, gemm).shape == (0, 2)
    assert products.dgrad(dy_TN.float(), w_NK.float(), None, None, gemm).shape == (3, 6)
    assert len(gemms) == 4
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    products.wgrad(dy_TN.float(), x_TK.float(), plan, None, gemm)
    assert len(gemms) == 5


# ---- use_triton ------------------------------------------------------------------------------------------------------


@pytest.fixture
def used():
    """Triton computes what is asked for on the CPU."""
    kernels.use_triton("cpu", [torch.float32])
    yield
    kernels.register(kernels.REFERENCE, device_type="cpu", dtype=torch.float32)


@interpreted
def test_a_layer_trains_with_it(used):
    plan = drawn_plan(20, 12, 0, "zero")
    x, w_NK = torch.randn(2, 5, 20), torch.randn(7, 20)
    results = []
    for implementation in (products.TRITON, kernels.REFERENCE):
        kernels.register(implementation, device_type="cpu", dtype=torch.float32)
        leaves = [leaf.clone().requires_grad_() for leaf in (x, w_NK)]
        with FlopCounterMode(display=False) as flops:
            y = column_parallel_products(*leaves, None, ProductContext(plan, None, Probes(), sums=False))
            y.square().sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
        assert flops.get_total_flops() == 3 * 2 * 10 * 7 * 12
    for result, expected in zip(*results, strict=True):
        assert_close(result, expected)


def test_what_triton_does_not_compute_is_an_error():
    here, other = ("cpu", "cuda") if IS_INTERPRETED else ("cuda", "cpu")
    with pytest.raises(ValueError, match=f"not on '{other}'"):
        kernels.use_triton(other)
    with pytest.raises(ValueError, match=r"of torch.float32, .*, not of torch.float64"):
        kernels.use_triton(here, [torch.float32, torch.float64])
    assert kernels.implementation_on(here, torch.float32) is kernels.REFERENCE


@interpreted
def test_operators_are_as_they_are_described_to_the_compiler():
    plan = drawn_plan(20, 12, 3, "average")
    operands = Operands.random(5, 7, plan, torch.float32)
    config = list(triton_tuning.FIXED)
    columns = plan.keep_P, plan.pruned, plan.lent
    x_TK, w_NK, dy_TN = (matrix.nan_to_num() for matrix in (operands.x_TK, operands.w_NK, operands.dy_TN))
    torch.library.opcheck(torch.ops.zeroresize.kept_inner, (x_TK, w_NK, None, plan.keep_P, 1, config))
    torch.library.opcheck(torch.ops.zeroresize.kept_columns, (dy_TN, w_NK, *columns, "average", None, 1, config))


@interpreted
def test_another_number_of_columns_compiles_nothing():
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=counted, fullgraph=True)
    def product(x_TK, w_NK, keep_P):
        return torch.ops.zeroresize.kept_inner(x_TK, w_NK, None, keep_P, 1, list(triton_tuning.FIXED)) + 1

    x_TK, w_NK = torch.randn(3, 20), torch.randn(4, 20)
    for num_kept in (12, 7, 19):
        keep_P = drawn_plan(20, num_kept, 0, "zero").keep_P
        torch._dynamo.maybe_mark_dynamic(keep_P, 0)
        assert_close(product(x_TK, w_NK, keep_P), x_TK[:, keep_P] @ w_NK[:, keep_P].T + 1)
    assert len(graphs) == 1


def test_float32_is_rounded_to_tf32_only_where_torch_may():
    assert not triton_tuning.uses_tf32()
    torch.set_float32_matmul_precision("high")
    try:
        assert triton_tuning.uses_tf32()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not triton_tuning.uses_tf32()


# ---- what is measured ------------------------------------------------------------------------------------------------


def forget():
    """As a new process, which has the file alone."""
    triton_tuning._known.cache_clear()
    triton_tuning._run_here.clear()


class Measured:
    """A device whose products take as long as is said, of which it keeps count."""

    def __init__(self, monkeypatch, tmp_path, seconds):
        self.asked = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(triton_tuning, "_seconds", lambda run: run())
        self._seconds = seconds
        forget()

    def fastest(self, tokens=8, product="forward", num_kept=12):
        operands = torch.empty(tokens, 16), torch.empty(4, 16)
        plan = drawn_plan(16, num_kept, 0, "zero")
        return triton_tuning.fastest(product, operands, plan, lambda: self._take(None), self._take)

    def _take(self, config):
        self.asked.append(config)
        seconds = self._seconds.get(config, 9.0)
        if seconds is None:
            raise triton.runtime.errors.OutOfResources(9, 1, "shared memory")
        return seconds


@pytest.fixture
def measured(monkeypatch, tmp_path):
    yield lambda seconds: Measured(monkeypatch, tmp_path, seconds)
    forget()


def test_the_fastest_is_taken_and_measured_once(measured, tmp_path):
    first, second, *_ = triton_tuning.CONFIGS
    device = measured({None: 3.0, first: None, second: 2.0})
    assert device.fastest() == second
    assert device.asked == [*triton_tuning.CONFIGS, None, *triton_tuning.CONFIGS[1:]]
    assert device.fastest() == device.fastest(tokens=7) == second
    assert len(device.asked) == 2 * len(triton_tuning.CONFIGS)
    for other in ({"tokens": 9}, {"product": "dgrad"}, {"num_kept": 4}):
        device.asked.clear()
        assert device.fastest(**other) == second and device.asked
    later = measured({})
    assert later.fastest() == later.fastest() == second and later.asked == [second]
    assert [path.suffix for path in (tmp_path / "zeroresize").iterdir()] == [".json"]


def test_what_another_host_measured_is_tried_before_it_is_taken(measured, monkeypatch):
    first, second, *_ = triton_tuning.CONFIGS
    without_a_compiler = {None: 3.0} | dict.fromkeys(triton_tuning.CONFIGS)
    assert measured(without_a_compiler).fastest() is None
    assert measured({None: 3.0, first: 1.0}).fastest() == first  # of which nothing was on file
    assert measured(without_a_compiler).fastest() is None
    device = measured({})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device.fastest() == first and not device.asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert device.fastest() == first and device.asked == [first]
    assert measured({None: 3.0, first: None, second: 2.0}).fastest() == second


def test_the_reference_is_taken_where_nothing_is_faster_or_a_graph_is_captured(measured, monkeypatch):
    device = measured({None: 1.0})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device.fastest() is None and not device.asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert device.fastest() is None and device.asked
    assert measured({}).fastest() is None


@pytest.mark.parametrize("content", ["", "[1]", '{"key": 3}', '{"key": [1, 2, 3, 4, 5]}'])
def test_a_file_that_is_none_is_measured_anew(measured, content):
    device = measured({None: 1.0})
    path = triton_tuning._path()
    path.parent.mkdir()
    path.write_text(content)
    assert device.fastest() is None
    assert [*json.loads(path.read_text()).values()] == [None]


def test_where_nothing_can_be_written_the_measurement_still_holds(measured, tmp_path, caplog):
    (tmp_path / "zeroresize").write_text("")
    device = measured({triton_tuning.CONFIGS[0]: 1.0})
    assert device.fastest() == device.fastest() == triton_tuning.CONFIGS[0]
    assert device.asked.count(None) == 1
    assert len(caplog.records) == 1


# ---- without a GPU ---------------------------------------------------------------------------------------------------

COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeroresize.kernels import triton_products as products

for name, constants in eval(sys.argv[1]):
    kernel = getattr(products, name)
    constants |= {stride: 1 for stride in ("x_K", "w_K", "y_N", "bias_N", "a_R", "b_K", "last_K", "out_K")}
    kinds = {"keep": "*i64", "pruned": "*i64", "lent": "*i64", "mean": "*fp32"}
    kinds |= dict.fromkeys(("x", "w", "bias", "y", "a", "b", "last", "out"), "*bf16")
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    values = [place for place, kind in enumerate(signature.values()) if kind != "constexpr"]
    aligned = {(place,): [["tt.divisibility", 16]] for place in values}
    constants = {argument: constants[argument] for argument, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    print("\\0" + binary.asm["ptx"])
"""


def compiled_for_sm_90(tmp_path, *what):
    """The PTX of kernels, for which no GPU is needed."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, repr(what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\0")[1:]


@pytest.mark.slow
def test_kernels_compile_and_load_blocks_by_16_bytes(tmp_path):
    tiles = {"GROUP": 8, "TILE_M": 64, "TILE_N": 64, "TILE_R": 32, "WIDE": False, "PRECISION": "ieee"}
    plain, blocks = {**tiles, "BLOCK": 1}, {**tiles, "BLOCK": 16}
    ptx = compiled_for_sm_90(
        tmp_path,
        ("inner_kernel", {**plain, "HAS_BIAS": False}),
        ("inner_kernel", {**blocks, "HAS_BIAS": False}),
        ("columns_kernel", {**blocks, "IMPUTATION": 0}),
        ("columns_kernel", {**plain, "IMPUTATION": 1, "WIDE": True, "PRECISION": "tf32"}),
        ("columns_kernel", {**plain, "IMPUTATION": 2}),
        ("mean_kernel", {"BLOCK": 1, "WIDE": True, "TILE": 64}),
    )
    assert len(ptx) == 6
    assert ["cp.async.cg" in kernel for kernel in ptx[:3]] == [False, True, True]
    assert ["ld.global.b16" in kernel for kernel in ptx[:3]] == [True, False, False]
    assert all("mma" in kernel for kernel in ptx[:5])
