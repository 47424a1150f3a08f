"""Wrong values are refused where they are given: by every public constructor, for each parameter, on all ranks."""

import copy
import importlib
import inspect
import math
import os
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import gathered, on_ranks
from helpers.paced_layers import paced_cost_model
from helpers.strategies import switchable
from torch import nn

import zeroresize as zr
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
from zeroresize.pipeline import Pipeline, PipelineBalancer
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy import StrategyBalancer, StrategyTrainer, SwitchableModel
from zeroresize.utils.checked import checked, integer, real

NAN = float("nan")
#: Wrong values by kind; of lists also what is wrong of an entry.
FLAG = ("no", "yes", 1, NAN, None)
TEXT = (3, NAN, None, -1, True)
COUNT = ("4", NAN, -1, 0, 1.5, True)
SEED = ("4", NAN, -1, 1.5, True)
POSITIVE = ("x", NAN, -1, 0, True)
FUNCTION = (3, "print", NAN, -1, [print])
CLASS = (3, "tp", NAN, -1)
LIST = (3, "ab", NAN, -1)
BOUNDARIES = (*LIST, "024", [0, 1.5], [0, NAN], [0, "2"])
BYTES = (*LIST, [NAN, 1.0], [-1, 1], ["4", 1])
SHARE = ("x", NAN, -1, 1.0, True)
PATH = (3, NAN, -1, True)
PAPER_TEXT = (3, NAN, None, -1, "mean_", True)
ANY = ()  # whatever stands there is looked at elsewhere


def rows(kind, names):
    return dict.fromkeys(names.split(), kind)


LINEAR = (
    rows(COUNT, "in_features out_features unit_size")
    | rows(FLAG, "bias")
    | rows(SEED, "own_features")
    | rows((NAN, "2", 1.5), "parts")
    | rows(CLASS, "process_group dtype")
    | rows((3.5, NAN, []), "device")
)
STYLE = (
    rows(CLASS, "input_layouts output_layouts")
    | rows(FLAG, "use_local_output")
    | rows((NAN, "2"), "parts")
    | rows(COUNT, "unit_size")
)
#: Of every public constructor: each of its parameters, with values that are not allowed.
WRONG = {
    "BalanceConfig": rows(PAPER_TEXT, "mode target priority pruned_update migration_transport")
    | rows(COUNT, "update_every block iters_per_epoch")
    | rows(SEED, "seed")
    | rows(FLAG, "moves start_checks")
    | rows(("x", NAN, -1, True), "ratio tolerance budget min_gain ageing max_ratio")
    | {"ranks": (3, "x", NAN, [-1], [0, 0]), "shares": (3, "x", NAN, [-1, 1], [0, 0], ["a", 1])}
    | {"memory_limits": (3, "x", NAN, [NAN, 1], [-1, 1], ["4", 1]), "paper": (3, "x", {"alph": 1})},
    "PaperConfig": rows(PAPER_TEXT, "semi_rule mig_rule pridiff_rule snapshot imputation")
    | rows(("x", NAN, -1, True), "num_migrating alpha theta_iter"),
    "Balancer": rows(CLASS, "model config process_group data_parallel_group")
    | rows(FUNCTION, "on_update on_status")
    | rows(ANY, "optimizer"),
    "StageBalancer": rows(CLASS, "pipeline config process_group data_parallel_group")
    | rows(FUNCTION, "on_update")
    | rows(ANY, "optimizer"),
    "CheckpointReader": rows(PATH, "path"),
    "DataBalancer": rows(CLASS, "model process_group")
    | rows(COUNT, "global_batch max_samples num_micro_batches micro_batch_size")
    | rows((*COUNT, 1), "update_every")
    | rows(BOUNDARIES, "counts")
    | rows(FUNCTION, "on_change on_status")
    | rows(ANY, "optimizer"),
    "ColumnParallelLinear": LINEAR | rows(FLAG, "gather_output"),
    "RowParallelLinear": LINEAR | rows(FLAG, "input_is_parallel"),
    "ColwiseParallel": STYLE,
    "RowwiseParallel": STYLE,
    "GradScaler": rows(TEXT, "device") | rows(CLASS, "process_group") | rows(ANY, "options"),
    "JsonLinesTelemetry": rows(PATH, "path") | rows(SEED, "from_step"),
    "PrometheusTelemetry": rows((0, 65536, NAN, "9"), "port") | rows(PATH, "textfile"),
    "OpenTelemetrySpans": {},
    "WandbTelemetry": rows(FLAG, "commit"),
    "TensorBoardTelemetry": rows(PATH, "folder") | rows(SEED, "from_step"),
    "Segment": rows((3, NAN, [3], "ab"), "column")
    | rows((3, NAN, -1), "row")
    | rows((3, NAN, [3], "ab"), "shared")
    | rows((3, NAN, [3], "ab", [("a", "b")], [("a", 0, 1)]), "extra")
    | rows(COUNT, "unit_size head_size group_size")
    | rows(SEED, "min_units")
    | rows((NAN, "2"), "parts")
    | rows(FUNCTION, "on_change why_even")
    | rows(TEXT, "kind")
    | rows((3, "ab", [3], [(nn.Dropout(), "1")]), "dropouts")
    | rows((3, "ab", [3], ["norm.weight"]), "replicated")
    | rows(FLAG, "has_other_dropout divisible"),
    "StragglerInjector": rows(CLASS, "process_group model")
    | rows((3, "x", [2], {0: NAN}, {0: -1}, {0: "2"}, {"0": 2}), "chi")
    | rows(FUNCTION, "schedule")
    | rows((3, "gem", NAN), "scope"),
    "watch": rows(CLASS, "model process_group")
    | rows(FUNCTION, "on_status")
    | rows(COUNT, "update_every")
    | rows(SHARE[:3], "tolerance")
    | rows((3, "adam"), "optimizer"),
    "convert": rows(CLASS, "model process_group")
    | rows(FUNCTION, "module_filter_fn")
    | rows((3, "evn", NAN, ["a"], [NAN, 1]), "shares")
    | rows((3, [3], "ab"), "segments")
    | rows(ANY, "optimizer"),
    "pipeline.Pipeline": rows((3, "ab", [3]), "layers")
    | rows((3, "x", NAN, None), "loss")
    | rows(COUNT, "num_microbatches")
    | rows(CLASS, "process_group replicas")
    | rows(BOUNDARIES, "boundaries")
    | rows((3, "1f2b", NAN), "schedule")
    | rows((3.5, NAN, "gpu"), "device")
    | rows(FUNCTION, "initialize count"),
    "pipeline.PipelineBalancer": rows(CLASS, "pipeline optimizer replicas units repack")
    | rows(COUNT, "profile_every max_bytes")
    | rows(POSITIVE, "max_measuring")
    | rows((3, "token"), "count_work")
    | rows((3, "tme", NAN), "by")
    | rows(BYTES, "memory_limits")
    | rows(SHARE, "min_saving")
    | rows(FLAG, "measure_links move_during_backward")
    | rows(FUNCTION, "on_change on_profile"),
    "pipeline.Repack": rows(COUNT, "least_stages")
    | rows(POSITIVE, "max_slowdown")
    | rows((3, "ab", [3]), "on_release"),
    "pipeline.LayerProfiler": rows(CLASS, "pipeline optimizer") | rows(FLAG, "counts_activations"),
    "pipeline.plan_pipeline": rows((3, "ab", [3]), "layers")
    | rows(COUNT, "num_stages num_microbatches")
    | rows((3, "1f2b"), "schedule")
    | rows((3, "tme"), "by")
    | rows(BYTES, "speeds memory_limits")
    | rows(BOUNDARIES, "boundaries"),
    "strategy.CostModel": rows(CLASS, "layers links")
    | rows((3, "ab", [3]), "tensors")
    | rows((*LIST, [1.5], ["a"], [-1]), "nodes")
    | rows(("x", NAN, -1, True), "optimizer_ratio")
    | rows(BYTES, "slowness")
    | rows(COUNT, "max_message_bytes"),
    "strategy.LengthRange": rows(COUNT, "up_to max_tokens") | rows((3, "ab", NAN), "strategy"),
    "strategy.LinkSpeeds": rows(POSITIVE, "within_bytes_per_s between_bytes_per_s node_bytes_per_s")
    | rows(("x", NAN, -1, True), "latency_s"),
    "strategy.Strategy": rows(COUNT, "dp tp pp")
    | rows((3, "ab", [1.5], [-1], [NAN]), "ranks")
    | rows((3, "ab", [NAN], [-1], ["1"]), "shares")
    | rows((3, "ab", [1.5, 2], [0, NAN], "02"), "boundaries"),
    "strategy.StrategyBalancer": rows(CLASS, "trainer cost")
    | rows(POSITIVE, "limit_bytes")
    | rows(SHARE, "tolerance min_saving")
    | rows(FUNCTION, "probe on_change")
    | rows(CLASS, "clock"),
    "strategy.StrategyTrainer": rows(CLASS, "model optimizer")
    | rows((3, "ab"), "ranges")
    | rows((3, "x", NAN, None), "loss")
    | rows(COUNT, "max_tokens")
    | rows(("x", NAN, -1, True), "grad_clip")
    | rows(FLAG, "overlap")
    | rows(("4", NAN, 1.5, True), "seed")
    | rows(FUNCTION, "count"),
    "strategy.SwitchableModel": rows((3, "ab", [3]), "layers")
    | rows((3, "ab"), "strategies")
    | rows(CLASS, "process_group compute_dtype gradient_dtype")
    | rows((3, "ab", NAN), "optimizer_strategy")
    | rows(FUNCTION, "segments initialize")
    | rows((3.5, NAN, "gpu"), "device")
    | rows((3, "ab", [1.5], [-1], ["0"]), "nodes")
    | rows(COUNT, "max_bytes"),
    "strategy.candidate_strategies": rows(COUNT, "num_ranks num_layers ranks_per_node")
    | rows((3, "ab", [1.5], [0], ["4"]), "units"),
    "strategy.search_strategies": rows((3, "ab", [3], [[1.5]], [[NAN]], [["4"]]), "sample")
    | rows((3, "ab", [3]), "candidates")
    | rows(CLASS, "cost")
    | rows(POSITIVE, "memory_limit")
    | rows((3, "ab", [1.5], ["4"]), "thresholds")
    | rows(COUNT, "max_ranges max_tokens"),
    "microbatch.CostTable": rows((3, "ab", [3]), "kinds names")
    | rows((3, "ab", {"none": 3}, {3: {}}), "grids")
    | rows(TEXT, "device")
    | rows((3, "ab", [3]), "handed"),
    "microbatch.IterationPlanner": rows(FUNCTION, "lengths_of")
    | rows(CLASS, "table options")
    | rows(BOUNDARIES, "boundaries"),
    "microbatch.MicroBatchBalancer": rows(CLASS, "trainer planners")
    | rows(SHARE, "tolerance min_saving")
    | rows(("x", NAN, -1, True), "optimizer_ratio")
    | rows(FUNCTION, "probe on_change")
    | rows(CLASS, "clock"),
    "microbatch.MicroBatchTrainer": rows(CLASS, "model optimizer plans")
    | rows(FUNCTION, "batch_from hollow lengths_of count")
    | rows((3, "ab", [3]), "sizes")
    | rows((3, "x", NAN, None), "loss")
    | rows(("x", NAN, -1, True), "grad_clip")
    | rows(("4", NAN, 1.5, True), "seed"),
    "microbatch.PlanningOptions": rows(COUNT, "num_replicas size num_clusters")
    | rows(POSITIVE, "memory_limit")
    | rows((3, "dynmic"), "method")
    | rows((3, "ab", [-1], [1.5], ["4"]), "row_lengths")
    | rows((3, "srted"), "order")
    | rows((3, "1f2b"), "schedule")
    | rows((3, "ab", [3], [["a"]], [[NAN]], [[-1]]), "slowness"),
    "microbatch.ProfiledShapes": rows((3, "ab", [3]), "names")
    | rows(COUNT, "most_rows shortest")
    | rows((3, "ab", [1.5], [1], ["4"]), "longest")
    | rows(POSITIVE, "most_tokens"),
    "microbatch.RunPlanners": rows(CLASS, "planner store process_group device")
    | rows(SEED, "first")
    | rows((3.5, NAN, "x", True), "last")
    | rows(COUNT, "num_workers ahead")
    | rows(POSITIVE, "timeout_s"),
    "integrations.SwappedClasses": rows((3, "ab", {3: 4}), "classes")
    | rows(FUNCTION, "why_left_alone process_group_of")
    | rows((3, "ab", [3]), "vocabulary_heads"),
    "integrations.HostForwardClasses": rows((3, "ab", {3: 4}, {nn.Linear: 4}), "columns rows segments")
    | rows(FUNCTION, "why_left_alone process_group_of")
    | rows((3, "ab", [3]), "vocabulary_heads"),
}
#: What the package makes and users only read.
MADE_HERE = {
    *("ChangeRecord", "ParallelFinding", "SegmentCheck", "UpdateRecord", "Watch", "HostAdapter", "StaysEven"),
    *("RankStatus", "Status"),
    *("LayerMoveReport", "LayerProfile", "MoveDuringBackward", "PipelinePlan", "PipelineProfile", "ProfileRecord"),
    *("RebalancingProposal", "Release", "RepackingReport", "Position", "RangeReport", "SearchResult", "StepReport"),
    *("SwitchReport", "DoesNotFitError", "IterationReport", "Packed", "PaddedBatch", "PairBatch"),
}
ROOMS = ("", ".pipeline", ".strategy", ".microbatch", ".integrations")


def named(name):
    room, _, of_room = f"zeroresize.{name}".rpartition(".")
    return getattr(importlib.import_module(room), of_room)


def test_every_parameter_of_every_public_constructor_has_a_row():
    public = {}
    for room in ROOMS:
        module = importlib.import_module(f"zeroresize{room}")
        public |= {f"{room}.{name}".lstrip("."): getattr(module, name) for name in module.__all__}
    classes = {name for name, each in public.items() if inspect.isclass(each) and name.split(".")[-1] not in MADE_HERE}
    assert {name.split(".")[-1] for name in classes} <= {name.split(".")[-1] for name in WRONG}
    for name, row in WRONG.items():
        assert set(inspect.signature(named(name)).parameters) == set(row), name


#: Values of which no kind can be told from the annotation.
SOUND = {"integrations.SwappedClasses": {"classes": {nn.Linear: nn.Linear}}, "StragglerInjector": {"chi": {0: 2.0}}}
EXAMPLES = {int: 2, float: 1.0, str: "x", bool: True, Any: None, Mapping: {}, torch.device: torch.device("cpu")} | {
    nn.Module: nn.Linear(2, 2),
    torch.Tensor: torch.zeros(2),
}


def shell(hint):
    """A value of the kind: nothing is made of it, so an empty object does."""
    kind = typing.get_origin(hint) or getattr(hint, "__bound__", None) or hint
    if kind in (typing.Union, types.UnionType):
        return shell(typing.get_args(hint)[0])
    if kind is Callable:
        return print
    if kind in (tuple, Sequence, Iterable):
        return ()
    if kind is dist.ProcessGroup:
        return dist.group.WORLD
    if kind in EXAMPLES:
        return EXAMPLES[kind]
    return kind.__new__(kind)


def refusal(name, parameter, value):
    """The error for this value, where all others are of the right kind."""
    function = named(name)
    constructor = function.__init__ if inspect.isclass(function) else function
    module = vars(importlib.import_module(function.__module__))
    parameters = inspect.signature(function).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    hints = {
        each.name: eval(each.annotation, {"DeviceMesh": dist.DeviceMesh, "Pipeline": Pipeline} | module)
        for each in needed
    }
    given = {each: shell(hint) for each, hint in hints.items()} | SOUND.get(name, {}) | {parameter: value}
    try:
        function(**given)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}\n: {error}"
    return f"{constructor} accepts it\n"


@on_ranks(1)
def test_wrong_values_are_refused_with_what_and_where(rank, group):
    tried, unclear = 0, []
    for name, row in WRONG.items():
        for parameter, values in row.items():
            default = inspect.signature(named(name)).parameters[parameter].default
            for value in values:
                if value is default:
                    continue
                tried += 1
                text = refusal(name, parameter, value)
                if parameter[:7] not in text or "\n" in text or len(text) > 400:
                    unclear.append(f"{name}({parameter}={value!r}): {text[:200]!r}")
    assert not unclear, f"{len(unclear)} of {tried}:\n" + "\n".join(unclear)
    assert tried >= 250


@checked(count=integer(1), limits=real(above=0.0))
def taken(
    count: int = 1,
    limits: Sequence[float] | None = None,
    path: str | os.PathLike[str] = "",
    kind: Literal["a", "b"] = "a",
    bounds: tuple[int, ...] = (),
) -> Any:
    return count, limits, path, kind, bounds


def test_what_is_sound_is_taken_and_numbers_of_numpy_and_torch_become_plain_ones(tmp_path):
    assert taken(np.int64(3), np.array([1.0, 2.0]), tmp_path, "b", torch.tensor([0, 4])) == (
        3,
        [1.0, 2.0],
        tmp_path,
        "b",
        [0, 4],
    )
    count, (limit, _), *_ = taken(2**40, [np.float32(0.5), 2])
    assert type(count) is int and type(limit) is float and limit == 0.5
    assert inspect.signature(taken).parameters["limits"].default is None
    for wrong, text in (
        ({"limits": [1.0, -1.0]}, r"limits\[1\]=-1.0"),
        ({"bounds": [0, 1.5]}, "bounds"),
        ({"path": 3}, "path=3"),
    ):
        with pytest.raises(ValueError, match=f"taken: {text}.* is not allowed"):
            taken(**wrong)
    with pytest.raises(
        TypeError, match=r"^taken: .*unexpected keyword argument 'size'; it takes \(count=1, limits=None, path="
    ):
        taken(size=3)


def everyone_fails(rank, make):
    """What both ranks say within 2 s where ``make(is_wrong)`` is wrong on rank 1 alone."""
    begin = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as error:
        make(rank == 1)
    assert time.monotonic() - begin < 2.0
    return str(error.value)


@on_ranks(2, timeout_s=60)
def test_what_is_wrong_on_one_rank_alone_is_told_to_the_other_at_once(rank, group):
    def wrong(is_wrong, name, value):
        return {name: value} if is_wrong else {}

    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    pipeline = Pipeline(copy.deepcopy(layers), nn.MSELoss(), num_microbatches=2, process_group=group)
    optimizer = torch.optim.SGD(pipeline.parameters())
    model, _ = switchable(group, [Strategy(pp=2)])
    of_model = torch.optim.SGD(model.parameters())
    ranges = [LengthRange(8, Strategy(pp=2))]
    trainer = StrategyTrainer(model, of_model, ranges, loss=nn.MSELoss())
    cost = paced_cost_model(model.tensors, 2, 1e-3, 2)
    row = ColumnParallelLinear(4, 4, process_group=group), RowParallelLinear(4, 4, process_group=group)
    divided = nn.Sequential(*row)
    of_divided, copied = torch.optim.SGD(divided.parameters()), lambda: copy.deepcopy(divided)
    for number, make in enumerate(
        (
            lambda bad: Pipeline(list(pipeline.layers), print, num_microbatches="2" if bad else 2, process_group=group),
            lambda bad: Pipeline(list(pipeline.layers), 3 if bad else print, num_microbatches=2, process_group=group),
            lambda bad: Pipeline(layers, print, num_microbatches=2, process_group=group, **wrong(bad, "device", "gpu")),
            lambda bad: Pipeline(layers, print, num_microbatches=2, process_group=group, **wrong(bad, "device", 3.5)),
            lambda bad: SwitchableModel(3 if bad else layers, strategies=[Strategy(pp=2)], process_group=group),
            lambda bad: switchable(group, [Strategy(pp=2)], **wrong(bad, "device", "gpu")),
            lambda bad: PipelineBalancer(pipeline, optimizer, **wrong(bad, "repack", 3)),
            lambda bad: PipelineBalancer(pipeline, optimizer, **wrong(bad, "on_change", 3)),
            lambda bad: PipelineBalancer(pipeline, optimizer, **wrong(bad, "replicas", 3)),
            lambda bad: switchable(group, [Strategy(pp=2)], **wrong(bad, "nodes", "ab")),
            lambda bad: switchable(group, [Strategy(pp=2)], **wrong(bad, "max_bytes", 0)),
            lambda bad: StrategyTrainer(
                model, of_model, ranges, loss=nn.MSELoss(), **wrong(bad, "grad_clip", math.nan)
            ),
            lambda bad: StrategyTrainer(model, of_model, ranges, loss=nn.MSELoss(), **wrong(bad, "overlap", "no")),
            lambda bad: StrategyTrainer(model, of_model, [3] if bad else ranges, loss=nn.MSELoss()),
            lambda bad: StrategyTrainer(model, of_model, ranges, loss=nn.MSELoss(), **wrong(bad, "grad_clip", 0.5)),
            lambda bad: zr.convert(copied(), group, shares="abc" if bad else (2, 1)),
            lambda bad: zr.convert(copied(), group, shares=(1,) if bad else (2, 1)),
            lambda bad: StrategyBalancer(trainer, cost, **wrong(bad, "tolerance", "x")),
            lambda bad: zr.Balancer(divided, of_divided, **wrong(bad, "on_update", 3)),
            lambda bad: zr.watch(nn.Linear(2, 2), **wrong(bad, "update_every", "10")),
            lambda bad: model.add(3 if bad else Strategy(tp=2)),
            lambda bad: model.switch_to("pp" if bad else Strategy(pp=2)),
            lambda bad: model.forget(3 if bad else Strategy(tp=2)),
            lambda bad: pipeline.step(torch.ones(2, 2), target=0 if bad else torch.ones(2, 2)),
        )
    ):
        said = gathered(group, everyone_fails(rank, make))
        texts = "allowed", "differ in grad_clip", "a batch is made of tensors: int is none"
        assert any(text in said[1] for text in texts), (number, said)
        assert "1" in said[0], (number, said)


@on_ranks(2)
def test_shares_that_one_rank_alone_gives_are_refused_though_the_other_does_not_come(rank, group, *, monkeypatch):
    monkeypatch.setattr("zeroresize.conversion._MOST_WAIT", timedelta(seconds=0.5))
    model = nn.Sequential(ColumnParallelLinear(4, 4, process_group=group), RowParallelLinear(4, 4, process_group=group))
    if rank == 0:
        with pytest.raises(ValueError, match=r"shares=\(2, 1, 1\) is not allowed"):
            zr.convert(model, group, shares=(2, 1, 1))
