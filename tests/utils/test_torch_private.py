"""Each private name of torch is there and does what it is used for: what fails here is what a new torch has changed."""

import ast
import collections
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from zeroresize.utils import torch_private

pytestmark = pytest.mark.versions

PACKAGE = Path(torch_private.__file__).parents[1]
#: Private names of Python's own library that are used.
OF_PYTHON = {"_current_frames", "_exit", "_getframe", "_make", "_register_atexit", "_replace"}
#: Of transformers and Colossal-AI, and of DeepSpeed.
OF_HOSTS = {
    *("_attn_implementation", "_compute_grad_norm", "_origin_length"),
    *("_dp_group", "_hp_mapping", "_partition_sizes"),
    *(
        "_create_master_param_current_rank",
        "_master_param_groups_of_current_rank",
        "_partition_grads",
        "_overlap_allgather",
    ),
}


def names_defined(nodes):
    """Functions, classes, variables and attributes that a file itself makes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif type(node.ctx) is ast.Store and (isinstance(node, ast.Name) or getattr(node.value, "id", "") == "self"):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_nothing_else_in_the_package_names_a_private_part_of_torch():
    defining, using = (ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute), (ast.ImportFrom, ast.Import)
    nodes = {
        path: [node for node in ast.walk(ast.parse(path.read_text())) if type(node) in (*defining, *using)]
        for path in PACKAGE.rglob("*.py")
    }
    known = (OF_PYTHON | OF_HOSTS).union(
        *(names_defined(node for node in held if type(node) in defining) for held in nodes.values())
    )
    uses = []
    for path, node in ((path, node) for path, held in nodes.items() for node in held):
        if path.name == "torch_private.py":
            continue
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if is_own or node.attr in known else [node.attr]
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            names = [*str(node.module).split("."), *(one.name for one in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for one in node.names if one.name.startswith("torch") for part in one.name.split(".")]
        else:
            continue
        uses += [f"{path}:{node.lineno} {name}" for name in names if name.startswith("_") and not name.endswith("__")]
    assert not uses, "\n".join(uses)


def test_groups_and_their_backends_are_known_and_the_next_group_gets_the_name_that_it_is_given(run_ranks):
    def check(rank, group):
        def make():
            return dist.new_group([0], use_local_synchronization=True)

        assert torch_private.known_groups() == {group: group.group_name} and group.bound_device_id is None
        with torch_private.groups_are_not_split():
            limited = dist.new_group([0], timeout=timedelta(seconds=7))
        (backend, *_) = torch_private.backends_of(limited)
        assert torch_private.backend_of(limited, torch.device("cpu")).name() == backend.name() == "gloo"
        assert torch_private.timeout_of(backend) == timedelta(seconds=7)
        by_others = []
        with torch_private.name_of_next_group("given"):
            thread = threading.Thread(target=lambda: by_others.append(make().group_name))
            thread.start()
            thread.join()
            made = [make().group_name, make().group_name]
        assert made[0] == "given"
        assert "given" not in (*by_others, made[1], make().group_name)
        with pytest.raises(ZeroDivisionError), torch_private.name_of_next_group("never"):
            raise ZeroDivisionError
        assert make().group_name != "never"

        from torch.distributed.fsdp import FullyShardedDataParallel

        linear = nn.Linear(3, 4)
        assert not torch_private.is_flat_parameter(linear.weight)
        wrapped = FullyShardedDataParallel(linear, use_orig_params=True, device_id=torch.device("cpu"))
        assert all(map(torch_private.is_flat_parameter, wrapped.parameters()))

    run_ranks(check, 1)


def test_what_fully_shard_holds_is_known_and_becomes_another_in_the_same_parameter(run_ranks):
    def check(rank, group):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(nn.Linear(3, 4, bias=False))
        assert not torch_private.is_fsdp_module(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert torch_private.is_fsdp_module(model)
        parameter = model[0].weight
        (known,) = torch_private.fsdp_parameters_of(model)
        assert known.sharded_param is parameter and torch_private.why_not_sharded_anew(known) is None
        model.set_requires_gradient_sync(False)
        for is_reduced in (False, True):
            model.set_requires_gradient_sync(is_reduced)
            model(torch.ones(2, 3)).sum().backward()
            assert torch_private.has_unreduced_gradient(known) is not is_reduced
        assert torch_private.size_before_sharding(known) == (4, 3) and torch_private.ranks_of_fsdp(known) == [0, 1]
        whole = torch.arange(15.0).view(5, 3)
        made = torch_private.sharded_anew(known, whole)
        assert model[0].weight is parameter and parameter.shape == known.sharded_param.shape == (4, 3)
        torch_private.shard_anew(known, made)
        assert model[0].weight is parameter and parameter.shape == (5, 3) and parameter.grad is None
        assert torch.equal(parameter.to_local(), whole[3 * rank : 3 * rank + 3])
        assert torch.equal(parameter.full_tensor(), whole)
        y = model(torch.ones(2, 3))
        assert torch.equal(y, whole.sum(dim=1).expand(2, 5))
        y.sum().backward()
        assert torch.equal(parameter.grad.full_tensor(), torch.full((5, 3), 2.0))
        model[0].weight = nn.Parameter(parameter.detach().clone())  # as who loads a model
        (known,) = torch_private.fsdp_parameters_of(model)
        assert known.sharded_param is model[0].weight is not parameter

    run_ranks(check, 2)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
def test_options_of_nccl_take_a_time_limit():
    assert torch_private.nccl_options(timedelta(seconds=7))._timeout == timedelta(seconds=7)


def test_collectives_with_private_names_are_there(monkeypatch):
    assert all(callable(getattr(dist.ProcessGroup, name)) for name in torch_private.PRIVATE_COLLECTIVES)
    broadcast = dist._broadcast_coalesced
    monkeypatch.setattr(dist, "_broadcast_coalesced", broadcast)
    torch_private.replace_ddp_broadcast(lambda function: (function, "replaced"))
    assert dist._broadcast_coalesced == (broadcast, "replaced")


def test_the_wait_of_functional_collectives_is_replaced_also_where_the_operator_is_called_by_its_overload(monkeypatch):
    waits, calls = torch.ops._c10d_functional.wait_tensor, []
    for operator in (waits, waits.default):
        monkeypatch.setattr(operator, "_op", operator._op)  # put back afterwards

    def counting(function):
        def call(*args):
            calls.append(args)
            return function(*args)

        return call

    torch_private.replace_functional_wait(counting)
    x = torch.ones(2)
    assert waits(x).equal(x) and waits.default(x).equal(x)
    assert len(calls) == 2


def test_compiled_modules_are_told_from_others():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = torch.compile(module, backend="eager")
    other.compile(backend="eager")
    assert [torch_private.is_compiled_module(one) for one in (module, wrapped, other)] == [False, True, True]


def test_a_backward_has_a_number_and_an_end():
    events = []

    def arrived(gradient):
        events.append(torch_private.current_backward())
        if len(events) == 1:
            torch_private.call_at_end_of_backward(lambda: events.append("end"))

    x = torch.ones(1, requires_grad=True)
    assert torch_private.current_backward() == -1
    for _ in range(2):
        y = x * 2
        y.register_hook(arrived)
        (y * 3).backward()
    first, end, second = events
    assert end == "end" and -1 not in (first, second) and first != second


def test_modes_stay_on_while_gradients_are_computed():
    names = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    with Seen():
        total = checkpoint(torch.exp, x, use_reentrant=False).sum()
        names.clear()
        gradients = torch_private.gradients_within_modes(total, [x, unused])
    assert "exp" in names  # computed again
    assert torch.equal(gradients[0], torch.exp(x.detach())) and gradients[1] is None


def test_compiled_autograd_is_known(monkeypatch):
    from torch._dynamo import compiled_autograd

    assert not torch_private.in_compiled_autograd()
    monkeypatch.setattr(compiled_autograd, "in_compiled_autograd_region", True)
    assert torch_private.in_compiled_autograd()
    monkeypatch.delitem(sys.modules, "torch._dynamo.compiled_autograd")
    assert not torch_private.in_compiled_autograd()


def test_tensors_tell_what_was_written_and_where():
    x = torch.ones(2, 3)
    before = torch_private.version_of(x)
    x.add_(1.0)
    assert torch_private.version_of(x) == before + 1
    on_meta = torch.empty(4, device="meta")
    assert torch_private.storage_id(on_meta) == torch_private.storage_id(on_meta[1:])
    assert torch_private.storage_id(on_meta) != torch_private.storage_id(torch.empty(4, device="meta"))


def test_operators_are_seen_by_name():
    class Mode(torch_private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert isinstance(func, torch_private.Operator)
            seen.append((torch_private.name_of_operator(func), torch_private.is_copy_to(func)))
            return func(*args, **(kwargs or {}))

    seen = []
    with Mode() as mode:
        torch.ones(2, 2).to(torch.float64)
        with Mode() as inner:
            assert torch_private.dispatch_modes() == [mode, inner]
    assert ("aten::_to_copy", True) in seen and ("aten::ones", False) in seen


def test_groups_of_a_job_that_is_bound_to_a_device_are_not_split(monkeypatch):
    job = SimpleNamespace(bound_device_id="cuda:0")
    monkeypatch.setattr(torch_private.dist, "group", SimpleNamespace(WORLD=job))
    with pytest.raises(ZeroDivisionError), torch_private.groups_are_not_split():
        assert job.bound_device_id is None
        raise ZeroDivisionError
    assert job.bound_device_id == "cuda:0"


def nothing(*_):
    """A hook."""


@pytest.mark.parametrize(
    ("kind", "register"),
    [
        ("forward", "register_forward_hook"),
        ("forward_pre", "register_forward_pre_hook"),
        ("backward", "register_full_backward_hook"),
        ("backward_pre", "register_full_backward_pre_hook"),
    ],
)
def test_hooks_of_modules_are_found(kind, register):
    module = nn.Linear(2, 2)
    getattr(module, register)(nothing)
    assert list(torch_private.hooks_of(module, kind).values()) == [nothing]
    torch_private.set_hooks(module, kind, {})
    assert not torch_private.hooks_of(module, kind)
    handle = getattr(nn.modules.module, register.replace("register_", "register_module_"))(nothing)
    assert list(torch_private.hooks_of_all_modules(kind).values()) == [nothing]
    handle.remove()
    assert not torch_private.hooks_of_all_modules(kind)


def test_batch_norms_of_all_kinds_are_known_and_other_norms_are_none():
    norms = nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.LazyBatchNorm3d(), nn.SyncBatchNorm(2)
    assert all(isinstance(each, torch_private.BatchNorm) for each in norms)
    assert not any(isinstance(each, torch_private.BatchNorm) for each in (nn.GroupNorm(1, 2), nn.InstanceNorm1d(2)))


def test_what_stands_in_containers_is_replaced_by_what_a_function_makes_of_it():
    Pair = collections.namedtuple("Pair", "first second")
    value = {"a": [1, (2, None)], "b": Pair(3, {})}
    assert torch_private.map_leaves(lambda leaf: leaf and leaf + 1, value) == {"a": [2, (3, None)], "b": Pair(4, {})}


def test_hooks_of_parameters_are_found():
    parameter = nn.Parameter(torch.ones(1))
    kinds = {"backward": parameter.register_hook, "post_accumulate_grad": parameter.register_post_accumulate_grad_hook}
    for kind, register in kinds.items():
        assert not torch_private.hooks_of_parameter(parameter, kind)
        register(nothing)
        assert list(torch_private.hooks_of_parameter(parameter, kind).values()) == [nothing]
    assert not torch_private.hooks_of_parameter(None, "backward")


def test_what_tracing_stores_in_a_module_is_known():
    tracer = torch.fx.Tracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = nn.Module(), torch.fx.Graph(), {}
    assert str(tracer.create_arg(torch.ones(1)).target).startswith(torch_private.PREFIXES_OF_TRACING)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_optimizers_are_dropped(kind):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    getattr(optimizer, f"register_step_{kind}_hook")(nothing)
    assert list(getattr(optimizer, f"_optimizer_step_{kind}_hooks").values()) == [nothing]
    torch_private.drop_step_hooks(optimizer)
    assert not getattr(optimizer, f"_optimizer_step_{kind}_hooks")


def test_optimizers_that_only_wrap_are_told_by_their_attributes():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert torch_private.is_initialized(optimizer) and not torch_private.is_initialized(Wrapper(optimizer))
    private = {name for name in vars(optimizer) if torch_private.is_private_of_optimizer(name)}
    assert any("step_pre_hooks" in name for name in private) and any("state_dict" in name for name in private)


def test_the_reducer_of_ddp_is_built_anew_for_parameters_of_another_shape(run_ranks):
    def check(rank, group):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 4))
        seen = []
        model.module.register_forward_hook(lambda *_: seen.append(torch_private.running_ddp()))
        model(torch.ones(1, 3)).sum().backward()
        assert seen == [model] and torch_private.running_ddp() is None
        assert torch_private.why_ddp_cannot_be_rebuilt(model) is None
        torch_private.drop_reducer_of_ddp(model)
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.data[:2].clone(), None
        torch_private.rebuild_ddp(model)
        (model(torch.ones(1, 3)).sum() * (rank + 1.0)).backward()
        return model.module.weight.grad.tolist()

    assert run_ranks(check, 2) == [[[1.5] * 3] * 2] * 2
