"""Fixtures of all tests: real ranks, Colossal-AI, and what is skipped where."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread pool in the parent does not survive a fork

import importlib
import importlib.util
import inspect
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import is_hypothesis_test

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: its kernels, without a GPU
from helpers import processes

import zeroresize as zr
from zeroresize.measure import clocks
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.utils import progress

torch.set_num_threads(1)
progress._QUIET_S = threading.TIMEOUT_MAX  # how far something is would be told by the clock
for public in zr.__all__:  # once in each worker, not in every rank that is forked
    getattr(zr, public)

# Other work on the machine must not make a property false.
hypothesis.settings.register_profile(
    "exploring", deadline=None, max_examples=200, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
#: The same cases in every run: a run that fails is about what was changed. `make test-all` looks for new ones.
hypothesis.settings.register_profile(
    "same cases", hypothesis.settings.get_profile("exploring"), derandomize=True, max_examples=10
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same cases"))

COLOSSALAI_IS_REQUIRED = os.environ.get("ZERORESIZE_REQUIRE_COLOSSALAI") == "1"


def pytest_configure() -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as in the background of a script; what is started inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if COLOSSALAI_IS_REQUIRED and importlib.util.find_spec("colossalai") is None:
        raise pytest.UsageError("ZERORESIZE_REQUIRE_COLOSSALAI=1, but Colossal-AI is not installed (make setup)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_exhaustive(items)
    _mark_slow(items)
    _limit_examples(items)
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "colossalai_module" in getattr(item, "fixturenames", ()):
            item.add_marker("colossalai")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip_gpu)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """Slow tests first: were one the last to begin, all workers but that one would wait for its end.

    Each worker begins with the next part of all items, as many as the others (``--dist worksteal``), so each part has
    its share of slow ones at its beginning.
    """
    workers = getattr(session.config, "workerinput", {"workercount": 1})["workercount"]
    slow = [item for item in session.items if item.get_closest_marker("slow")]
    others = [item for item in session.items if not item.get_closest_marker("slow")]
    session.items[:] = [
        item
        for worker in range(workers)
        for of_kind in (slow, others)
        for item in of_kind[len(of_kind) * worker // workers : len(of_kind) * (worker + 1) // workers]
    ]
    return (yield)


def _mark_exhaustive(items: list[pytest.Item]) -> None:
    """Of tests marked ``few(n)``, all cases but n, from the first to the last at equal distances."""
    for cases in _cases([item for item in items if item.get_closest_marker("few")]):
        (number,) = cases[0].get_closest_marker("few").args
        kept = {round(at * (len(cases) - 1) / max(number - 1, 1)) for at in range(number)}
        for at, item in enumerate(cases):
            if at not in kept:
                item.add_marker("exhaustive")


def _mark_slow(items: list[pytest.Item]) -> None:
    """Of tests that start ranks, all cases but the first, but for those of faults."""
    usual = [item for item in items if not any(map(item.get_closest_marker, ("slow", "exhaustive")))]
    of_ranks = [item for item in usual if "run_ranks" in getattr(item, "fixturenames", ())]
    for cases in _cases([item for item in of_ranks if "fault" not in item.path.name]):
        for item in cases[1:]:
            item.add_marker("slow")


def _cases(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The items of each test function."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    return cases.values()


def _limit_examples(items: list[pytest.Item]) -> None:
    """No more examples than the profile in force has, also of tests that ask for more."""
    most = hypothesis.settings().max_examples
    for test in {getattr(item, "obj", None) for item in items if is_hypothesis_test(getattr(item, "obj", None))}:
        asked = test._hypothesis_internal_use_settings
        fewer = hypothesis.settings(asked, max_examples=min(asked.max_examples, most))
        getattr(test, "__func__", test)._hypothesis_internal_use_settings = fewer


#: Of the module whose tests run now, by the number of ranks.
_POOLS: dict[tuple[ModuleType, int], processes.RankPool] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests marked ``same_ranks`` run whole in ranks that are started once for all such tests of their module."""
    if pyfuncitem.get_closest_marker("same_ranks") is None or "run_ranks" not in pyfuncitem.fixturenames:
        return None
    __tracebackhide__ = True
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    try:
        with pytest.MonkeyPatch.context() as patch:
            others = {"monkeypatch": patch} if "monkeypatch" in given else {}
            pyfuncitem.obj(**given | others | {"run_ranks": processes.Wanted.run_ranks})
    except processes.Wanted as wanted:
        num_ranks, timeout_s = wanted.args
        key = pyfuncitem.module, num_ranks
    else:
        return True  # it wants none
    if key not in _POOLS:
        _POOLS[key] = processes.RankPool(*key, Path(tempfile.mkdtemp(prefix="zeroresize_pool_")))
    arguments = {name: value for name, value in given.items() if name not in ("run_ranks", "monkeypatch")}
    try:
        _POOLS[key].run(pyfuncitem.originalname, arguments, timeout_s)
    except BaseException:
        _POOLS.pop(key).close()
        raise
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks end with the last test of their module."""
    while _POOLS and (nextitem is None or nextitem.path != item.path):
        _POOLS.popitem()[1].close()


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """``run_ranks(fn, num_ranks, *args, timeout_s=60)`` returns ``fn(rank, group, *args)`` of every rank, by rank."""
    return processes.runner_in(tmp_path)


@pytest.fixture(autouse=True)
def a_tests_clock_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What helpers put in place of the time is undone, where a test lets them do so in this process."""
    monkeypatch.setattr(clocks, "time", clocks.time)


@pytest.fixture
def cheap_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before one was made, a move of units is expected to take what its messages do: tiny models move soon then."""
    monkeypatch.setattr("zeroresize.control.mover.BUDGET_S", 0.0)
    monkeypatch.setattr("zeroresize.measure.links.INSTALLING_S", 0.0)


@pytest.fixture
def copies_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models so small that sums of gradients would take longer than products, heads move one by one."""
    monkeypatch.setattr("zeroresize.control.mover.measure_copies", lambda *_: [0.0] * 5)


@pytest.fixture
def any_gain_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are divided as shares want it."""
    for module in ("control.mover", "layers.segment"):
        monkeypatch.setattr(f"zeroresize.{module}.COPY_GAIN", 0.0)


@pytest.fixture
def lending_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """As virtual time does not count transfers, lending would cost nothing, and moving bring nothing more."""
    monkeypatch.setattr("zeroresize.measure.calibration.measure_migration_cost", lambda *_: MigrationCost(fixed_s=1e3))


@pytest.fixture(scope="session")
def colossalai_module() -> ModuleType:
    """Colossal-AI, imported once in the parent (10 s), from which the ranks inherit it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import colossalai
            import colossalai.booster.plugin
            import colossalai.shardformer
    except ImportError as error:
        if COLOSSALAI_IS_REQUIRED:
            pytest.fail(f"ZERORESIZE_REQUIRE_COLOSSALAI=1, but Colossal-AI cannot be imported: {error!r}")
        pytest.skip(f"Colossal-AI cannot be imported: {error!r}")
    return colossalai


@pytest.fixture
def colossalai_vit_modules(colossalai_module: ModuleType) -> None:
    """What a ViT under ShardFormer needs, imported in the parent too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("colossalai.shardformer.policies.vit", "transformers.models.vit.modeling_vit"):
            importlib.import_module(module)
