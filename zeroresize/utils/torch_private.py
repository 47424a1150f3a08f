"""Every private name of torch that this package uses, and what it is for; nothing else in the package names one.

A new version of torch is read against this file: where it lacks a name, what needs that is an AttributeError.
``_parameters``, ``_buffers`` and ``_modules`` of ``torch.nn.Module`` and ``_version`` of tensors are reached here, too.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _python_dispatch, _pytree

_c10d: Any = dist.distributed_c10d

#: What all layers are that normalise by a batch, ``SyncBatchNorm`` and lazy ones among them.
BatchNorm = nn.modules.batchnorm._BatchNorm

# ---------------------------------------------------------------------------------------------------- process groups


def default_store() -> Store:
    """Return the store of the job, that ``init_process_group`` was given or has made: ``_get_default_store``."""
    return _c10d._get_default_store()


def known_groups() -> dict[ProcessGroup, str]:
    """Return all process groups that torch knows in this process, by name: ``distributed_c10d._world.pg_names``.

    They tell which group ``new_group`` has left with torch when it failed.
    """
    return dict(_c10d._world.pg_names)


@contextmanager
def name_of_next_group(name: str) -> Iterator[None]:
    """Give the next group that this thread makes a name, by which its ranks find each other in the store.

    ``torch.distributed.new_group`` has no argument for it. It asks ``distributed_c10d._process_group_name``, which is
    replaced until it was called once.
    """
    usual, thread = _c10d._process_group_name, threading.get_ident()

    def given(ranks: Sequence[int], use_hashed_name: bool) -> str:
        if threading.get_ident() != thread:
            return usual(ranks, use_hashed_name)
        restore()
        return name

    def restore() -> None:
        if _c10d._process_group_name is given:
            _c10d._process_group_name = usual

    _c10d._process_group_name = given
    try:
        yield
    finally:
        restore()


@contextmanager
def groups_are_not_split() -> Iterator[None]:
    """Let groups be made without splitting the job's NCCL communicator while the block lasts.

    torch splits it where the job is bound to a device, ``bound_device_id``, and a split needs every rank of the job.
    """
    job: Any = dist.group.WORLD
    device, job.bound_device_id = job.bound_device_id, None
    try:
        yield
    finally:
        job.bound_device_id = device


def backend_of(process_group: ProcessGroup, device: torch.device) -> Any:
    """Return what communicates for tensors on ``device``, such as a ProcessGroupGloo: ``ProcessGroup._get_backend``."""
    return process_group._get_backend(device)


def backends_of(process_group: ProcessGroup) -> list[Any]:
    """Return the backends of all devices: ``ProcessGroup._device_types`` and :func:`backend_of`."""
    return [backend_of(process_group, device) for device in process_group._device_types]


def timeout_of(backend: Any) -> timedelta | None:
    """Return the time limit of a backend, ``_timeout`` of its options; None for others than gloo and NCCL."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def nccl_options(timeout: timedelta) -> Any:
    """Return options for a ``ProcessGroupNCCL`` with a time limit: ``Options._timeout``."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


#: Methods of ``ProcessGroup`` that start a collective under a private name.
PRIVATE_COLLECTIVES = ("_allgather_base", "_reduce_scatter_base")


def replace_ddp_broadcast(replacement_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function with which DistributedDataParallel sends buffers: ``distributed._broadcast_coalesced``."""
    module: Any = dist
    module._broadcast_coalesced = replacement_of(module._broadcast_coalesced)


def replace_functional_wait(replacement_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what ``_c10d_functional.wait_tensor`` calls, by which DTensor and compiled code wait: ``_op``."""
    packet: Any = torch.ops._c10d_functional.wait_tensor
    for operator in (packet, packet.default):
        operator._op = replacement_of(operator._op)


# ---------------------------------------------------------------------------------------------------------- backward


def current_backward() -> int:
    """Return a number of the backward that this thread is in, -1 outside of one: ``_C._current_graph_task_id``.

    It tells a forward that is computed again from a first one, and gradients of one backward from those of the next.
    """
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call ``callback`` when the current backward ends; a RuntimeError outside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_compiled_autograd() -> bool:
    """Return whether compiled autograd runs the current backward: ``torch._dynamo.compiled_autograd``, if imported."""
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and bool(compiled_autograd.in_compiled_autograd_region)


def gradients_within_modes(total: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a scalar as ``torch.autograd.grad`` does; None for inputs that have no part in it.

    That hands itself to a mode of functions, which is off meanwhile, also for what activation checkpointing computes
    again; ``torch.autograd.graph._engine_run_backward`` leaves it on.
    """
    if not inputs:
        return ()
    gradients: tuple[Tensor | None, ...] = torch.autograd.graph._engine_run_backward(
        (total,), (torch.ones_like(total),), True, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return gradients


def hooks_of_saved_tensors() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return what packs and unpacks saved tensors now, ``_top_saved_tensors_default_hooks``; None for nothing."""
    private: Any = torch._C._autograd
    return private._top_saved_tensors_default_hooks(True)


# ----------------------------------------------------------------------------------------------------- torch.compile


def keep_order_in_graphs(operator: Any) -> None:
    """Have compiled graphs run an operator, and others marked so, in the order of the program.

    It is ``library._register_effectful_op`` with ``_library.effects.EffectType``.
    """
    library: Any = torch.library
    library._register_effectful_op(operator, sys.modules["torch._library.effects"].EffectType.ORDERED)


def not_in_graphs(function: Any) -> Any:
    """Keep dynamo out of a function, as ``torch.compiler.disable`` does, without importing dynamo."""
    function._torchdynamo_disable = True
    return function


def constant_in_graphs(function: Any) -> Any:
    """Let dynamo call a function once for a graph, without importing it: ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True
    return function


def let_shapes_of_parameters_vary() -> None:
    """Let dynamo, once imported, take a parameter's size for a variable when it has changed, not compile anew for each.

    It is ``config.force_parameter_static_shapes``. A size that never changes stays a constant.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.force_parameter_static_shapes = False


def is_checkpointed_in_graph() -> bool:
    """Return whether dynamo puts a checkpointed part into a graph: ``_dynamo.symbolic_convert.tls.current_tx``."""
    dynamo: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(getattr(dynamo, "tls", None), "current_tx", None)  # none in torch.export
    tracer = translator and translator.output.current_tracer
    while tracer is not None and "activation_checkpoint" not in str(tracer.source_target):
        tracer = tracer.parent
    return tracer is not None


def leave_graph(why: str) -> None:
    """Have dynamo end a graph here, or where ``fullgraph=True`` does not allow it, fail: ``_dynamo.graph_break``."""
    torch._dynamo.graph_break(msg=why)


# ----------------------------------------------------------------------------------------------------------- tensors


def version_of(tensor: Tensor) -> int:
    """Return how often something was written to a tensor in place: ``Tensor._version``."""
    return tensor._version


def storage_id(tensor: Tensor) -> int:
    """Return a number of a tensor's storage, also on the meta device, where no memory tells it: ``_cdata``."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata


#: A ``__torch_function__`` that leaves all to ``__torch_dispatch__``.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def make_wrapper(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Make a tensor without memory, of a class with ``__torch_dispatch__``: ``Tensor._make_wrapper_subclass``."""
    return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)


def is_copy_to(function: Any) -> bool:
    """Return whether a dispatched function is what ``Tensor.to`` becomes: ``ops.aten._to_copy``."""
    return function is torch.ops.aten._to_copy.default


def reshaped_output(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``y``, whose memory nobody else holds, in this shape, no view: ``_is_view``, ``ops.aten._unsafe_view``."""
    return torch.ops.aten._unsafe_view(y, shape) if y._is_view() or y.shape != shape else y


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place by one kernel: ``torch._foreach_mul_``, as torch's own clipping does."""
    torch._foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[Tensor], p: float) -> list[Tensor]:
    """Return the ``p``-norm of each tensor by one kernel: ``torch._foreach_norm``, as torch's own clipping does."""
    return list(torch._foreach_norm(list(tensors), p))


def jagged_like(x: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` as a jagged tensor with the sequences of ``x``: ``_ragged_idx``, ``_maybe_min_seqlen``, ….

    The lengths are handed on where they are known: computing them would wait for the device.
    """
    jagged: Any = x
    lengths = jagged._ragged_idx, jagged._maybe_min_seqlen, jagged._maybe_max_seqlen
    return torch.nested.nested_tensor_from_jagged(values, jagged.offsets(), jagged.lengths(), *lengths)


def is_flat_parameter(parameter: Tensor) -> bool:
    """Return whether FSDP1 puts a part of a flat parameter in its place while it computes: ``_fsdp_flattened``."""
    return getattr(parameter, "_fsdp_flattened", False)


def is_tensor_of_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor is made of others, as a DTensor: ``_python_dispatch.is_traceable_wrapper_subclass``."""
    return _python_dispatch.is_traceable_wrapper_subclass(tensor)


#: The base of modes that see every operator, the type of operators, and that of tensors of which only shapes are known.
DispatchMode = _python_dispatch.TorchDispatchMode
Operator = torch._ops.OpOverload
FakeTensor = torch._subclasses.FakeTensor


def dispatch_modes() -> list[Any]:
    """Return the modes that are entered now, the outermost first: ``_get_current_dispatch_mode_stack``."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def name_of_operator(operator: Operator) -> str:
    """Return such as ``aten::mm``: ``OpOverload._schema.name``."""
    return operator._schema.name


def arguments_of_operator(operator: Operator) -> list[str]:
    """Return the names of an operator's arguments, in their order: ``OpOverload._schema.arguments``."""
    return [one.name for one in operator._schema.arguments]


def spin_on_device(cycles: int) -> None:
    """Keep the current stream of the current CUDA device busy for so many clock cycles: ``torch.cuda._sleep``."""
    torch.cuda._sleep(cycles)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of, as a DTensor of its local part; itself if it is plain."""
    if not is_tensor_of_tensors(tensor):
        return [tensor]
    names, *_ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = (getattr(tensor, name) for name in names)  # among them a DTensor's mesh
    return [part for each in inner if isinstance(each, Tensor) for part in plain_parts(each)]


def is_dtensor(tensor: Tensor | None) -> bool:
    """Return whether a tensor is a ``torch.distributed.tensor.DTensor``; its module is not imported for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor_of(dtensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, the very tensor: ``DTensor._local_tensor``.

    ``to_local()`` is a new tensor each time, and its backward is an error where the ranks hold uneven parts.
    """
    local: Tensor = dtensor._local_tensor  # type: ignore[attr-defined]
    return local


def set_local_tensor(dtensor: Tensor, local: Tensor) -> None:
    """Let this rank hold another part of a DTensor, whose shape and placements stay: ``DTensor._local_tensor``."""
    dtensor._local_tensor = local  # type: ignore[attr-defined]


def dtensor_like(dtensor: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor with the mesh, shape and placements of another one, of which this rank holds ``local``.

    It is made by the class itself with ``DTensor._spec``, since ``from_local`` looks whether the part is an even one.
    """
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    return kind(local, dtensor._spec, requires_grad=False)  # type: ignore[attr-defined]


def strided_shard(dim: int, num_parts: int) -> Any:
    """Return the placement by which a rank holds its share of each of equal parts: ``placement_types._StridedShard``.

    Checkpoints of DTensors do not know it.
    """
    return sys.modules["torch.distributed.tensor"].placement_types._StridedShard(dim, split_factor=num_parts)


def is_dividing(placement: Any) -> bool:
    """Return whether each rank holds a part by it: by a ``Shard``, or a :func:`strided_shard`, which is none."""
    return hasattr(placement, "dim")


def classes_of_checkpoint_index() -> tuple[Any, Any]:
    """Return what an index of checkpoints names: ``metadata._MEM_FORMAT_ENCODING``, ``filesystem._StorageInfo``."""
    from torch.distributed.checkpoint import filesystem, metadata  # not at every import of this package

    return metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo


# ----------------------------------------------------------------------------------------------------------- modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own dictionary of parameters, to be read and written: ``Module._parameters``."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own dictionary of buffers, to be read and written: ``Module._buffers``."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own dictionary of modules, to be read and written: ``Module._modules``."""
    return module._modules


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Return the names of buffers that state dictionaries leave out: ``Module._non_persistent_buffers_set``."""
    return module._non_persistent_buffers_set


def hooks_of(module: nn.Module, kind: str) -> dict[int, Any]:
    """Return a module's own dictionary of hooks of a kind, as "forward_pre": ``Module._forward_hooks`` and the like."""
    hooks: dict[int, Any] = getattr(module, f"_{kind}_hooks")
    return hooks


def set_hooks(module: nn.Module, kind: str, hooks: dict[int, Any]) -> None:
    """Give a module another dictionary of hooks of a kind; see :func:`hooks_of`."""
    setattr(module, f"_{kind}_hooks", hooks)


def hooks_of_all_modules(kind: str) -> Mapping[int, Any]:
    """Return the hooks of a kind on every module: ``nn.modules.module._global_forward_hooks`` and the like."""
    hooks: Mapping[int, Any] = getattr(nn_module, f"_global_{kind}_hooks")
    return hooks


def hooks_of_parameter(parameter: Tensor | None, kind: str) -> Mapping[int, Any]:
    """Return the hooks of a kind, "backward" or "post_accumulate_grad", on a tensor; none on None."""
    return getattr(parameter, f"_{kind}_hooks", None) or {}


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` wraps a module, or ``module.compile()`` was called: ``_compiled_call_impl``."""
    kind: Any = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    return isinstance(module, kind) or module._compiled_call_impl is not None


#: What ``torch.fx`` stores in a module that it traces begins so.
PREFIXES_OF_TRACING = ("_tensor_constant", "_torchbind_obj")


# -------------------------------------------------------------------------------------------------------- optimizers


def drop_step_hooks(optimizer: Optimizer) -> None:
    """Give an optimizer empty dictionaries of hooks around its steps: ``_optimizer_step_pre_hooks``, …."""
    for kind in ("pre", "post"):
        setattr(optimizer, f"_optimizer_step_{kind}_hooks", OrderedDict())


class GradScalerBase(torch.amp.GradScaler):
    """A loss scaler that has its scale from the start, as ranks that compute no loss need it, and unscales otherwise.

    By ``_lazy_init_scale_growth_tracker`` and ``_unscale_grads_``.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(torch.device(device))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return {inv_scale.device: self.unscale_gradients(optimizer, inv_scale, allow_fp16=allow_fp16)}

    def unscale_gradients(self, optimizer: Optimizer, inv_scale: Tensor, *, allow_fp16: bool) -> Tensor:
        """Multiply gradients by ``inv_scale``; return 1.0 there if some are not finite, else 0.0."""
        raise NotImplementedError


def check_and_unscale(gradients: Sequence[Tensor], inv_scale: Tensor) -> Tensor:
    """Multiply gradients of one device by ``inv_scale``; return 1.0 there if one is not finite, else 0.0."""
    is_infinite = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), is_infinite, inv_scale.to(is_infinite.device))
    return is_infinite


def is_initialized(optimizer: Optimizer) -> bool:
    """Return whether ``Optimizer.__init__`` has run, which sets ``_optimizer_step_pre_hooks``; wrappers skip it."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def is_private_of_optimizer(name: str) -> bool:
    """Return whether an attribute of an optimizer is one of ``Optimizer`` itself: ``_optimizer_…``."""
    return name.startswith("_optimizer_")


# ------------------------------------------------------------------------------------------- DistributedDataParallel

_DDP_BUILDERS = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
_DDP_ARGUMENTS = ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")


def running_ddp() -> DistributedDataParallel | None:
    """Return the wrapper whose forward is under way: ``DistributedDataParallel._active_ddp_module``."""
    private: Any = DistributedDataParallel
    running: DistributedDataParallel | None = private._active_ddp_module
    return running


def why_ddp_cannot_be_rebuilt(wrapper: DistributedDataParallel) -> str | None:
    """Return why :func:`rebuild_ddp` is not possible, as where torch builds reducers differently; None if it is."""
    private: Any = wrapper
    if getattr(private, "mixed_precision", None) is not None:
        return "it was made with mixed_precision"
    if getattr(private, "_delay_all_reduce_all_params", False):
        return "it reduces all gradients at once (delay_all_reduce_named_params)"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in private.module.parameters()):
        return "its optimizer steps in backward"
    is_known = all(callable(getattr(private, name, None)) for name in _DDP_BUILDERS)
    if not is_known or tuple(inspect.signature(private._ddp_init_helper).parameters) != _DDP_ARGUMENTS:
        return "this version of torch builds reducers differently"
    hook = private._get_ddp_logging_data().get("comm_hook", "")
    if hook and not private._comm_hooks:
        return f"it has the built-in communication hook {hook}"
    return None


def drop_reducer_of_ddp(wrapper: DistributedDataParallel) -> None:
    """Take the reducer's hooks off the parameters, and drop it: ``Reducer._remove_autograd_hooks``."""
    private: Any = wrapper
    private.reducer._remove_autograd_hooks()
    private.reducer = private.logger = None


def rebuild_ddp(wrapper: DistributedDataParallel) -> None:
    """Build a reducer for the parameters as they are, as the wrapper's constructor does: ``_ddp_init_helper``, …."""
    private: Any = wrapper
    parameters, expects_sparse = private._build_params_for_reducer()
    names = private._build_debug_param_to_name_mapping(parameters)
    private._ddp_init_helper(parameters, expects_sparse, names, private.static_graph)
    private._has_rebuilt_buckets = False
    hooks, private._comm_hooks = private._comm_hooks, []
    for hook, state in hooks:
        private.register_comm_hook(state, hook)
    if private.static_graph:
        private._static_graph_delay_allreduce_enqueued = False
        private.reducer._set_static_graph()
        private.logger._set_static_graph()


# ------------------------------------------------------------------------------------------------------- fully_shard

_FSDP_ARGUMENTS = ("param", "device", "shard_placement_fn", "mesh_info")


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` has a module; its own module is not imported for it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def fsdp_parameters_of(module: Any) -> list[Any]:
    """Return an ``FSDPParam`` for each parameter that ``fully_shard`` gathers with a module of its own.

    By ``FSDPModule._get_fsdp_state`` and ``FSDPState._fsdp_param_groups``. A Parameter that was replaced meanwhile, as
    by who loads a model (``FSDPParam._module_info`` tells), becomes known as with the next forward.
    """
    groups = module._get_fsdp_state()._fsdp_param_groups
    for known in (each for group in groups if group.is_sharded for each in group.fsdp_params):
        if getattr(known._module_info.module, known._module_info.param_name) is not known.sharded_param:
            known.reset_sharded_param()
    return [each for group in groups for each in group.fsdp_params]


def ranks_of_fsdp(known: Any) -> list[int]:
    """Return the ranks over which an ``FSDPParam`` is sharded, and replicated: ``FSDPParam.mesh_info``."""
    ranks: list[int] = sorted(known.mesh_info.mesh.mesh.flatten().tolist())
    return ranks


def reshard_fsdp(module: Any) -> None:
    """Let a module that ``fully_shard`` has hold shards only, also once a gathering under way has ended."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.wait_for_unshard()
        group.reshard()


def gathered_of(known: Any) -> Tensor | None:
    """Return the Parameter that is in place of an ``FSDPParam``'s while a model is gathered: ``_unsharded_param``."""
    gathered: Tensor | None = getattr(known, "_unsharded_param", None)
    return gathered


def is_replicated(known: Any) -> bool:
    """Return whether each rank has all of an ``FSDPParam``, as ``replicate`` makes it: its ``DDPMeshInfo`` says so."""
    return not hasattr(known.mesh_info, "shard_mesh_rank")


def why_not_sharded_anew(known: Any) -> str | None:
    """Return why :func:`shard_anew` is not possible for an ``FSDPParam``, or not known to be; None if it is."""
    if is_replicated(known):
        return "by replicate(), which does not shard: use DistributedDataParallel or fully_shard"
    if known.mesh_info.mesh.ndim != 1 or getattr(known.mesh_info, "is_spmd_mesh", False):
        return "over a mesh of more than one dimension"
    if known.fsdp_placement.dim != 0:
        return "along another dimension than the first (shard_placement_fn)"
    if known.offload_to_cpu:
        return "and offloads it (CPUOffloadPolicy)"
    if type(known.sharded_param._local_tensor) is not Tensor:
        return f"of a {type(known.sharded_param._local_tensor).__name__}"
    if tuple(inspect.signature(known._init_sharded_param).parameters) != _FSDP_ARGUMENTS:
        return "in a way that is not known of this version of torch"
    return None


def has_unreduced_gradient(known: Any) -> bool:
    """Return whether gradients of an ``FSDPParam`` are not reduced yet: also ``_unsharded_param.grad``."""
    gathered = gathered_of(known)
    return known.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)


def size_before_sharding(known: Any) -> torch.Size:
    """Return the shape of what ``fully_shard`` gathers of an ``FSDPParam`` on this rank: ``_orig_size``."""
    size: torch.Size = known._orig_size
    return size


def sharded_anew(known: Any, whole: Tensor) -> Any:
    """Return another ``FSDPParam``, for :func:`shard_anew`, that holds a shard of ``whole``; the model stays as it is.

    It is ``_init_sharded_param``, as in its constructor. Of a parameter that was a DTensor ``whole`` is the local part,
    and shape and placements stay.
    """
    placement, spec = known.fsdp_placement, known._unsharded_dtensor_spec
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    given = whole if spec is None else kind(whole, spec, requires_grad=False)
    given = nn.Parameter(given, known.sharded_param.requires_grad)
    made = copy.copy(known)
    made._setattr_on_modules = lambda parameter: None
    made._init_sharded_param(given, known.device, lambda _: placement, known.mesh_info)
    if known.post_forward_mesh_info:
        made._init_sharded_post_forward_param_metadata(given)
    del made._setattr_on_modules
    return made


def shard_anew(known: Any, made: Any) -> None:
    """Let an ``FSDPParam`` hold what :func:`sharded_anew` has made, in the same Parameter, without a gradient.

    It takes no memory; ``_unsharded_param`` is made anew by the next forward.
    """
    parameter, sharded = known.sharded_param, made.sharded_param
    parameter.grad = None
    parameter.data = sharded.detach()
    parameter._local_tensor, parameter._spec = sharded._local_tensor, sharded._spec
    made.sharded_param, made._orig_param_uid, made.all_gather_outputs = parameter, known._orig_param_uid, []
    vars(known).update(vars(made))
    vars(known).pop("_unsharded_param", None)
    known._setattr_on_modules(parameter)


def leaves_of(value: Any) -> list[Any]:
    """Return what stands in nested containers, in order."""
    return _pytree.tree_leaves(value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested containers with what a function makes of everything that stands in them."""
    return _pytree.tree_map(function, value)


def leaves_by_path(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what stands in nested containers, and where, as ``name[0]['key']``: ``_pytree.tree_flatten_with_path``."""
    leaves: Any = _pytree.tree_flatten_with_path(value)[0]
    return [(f"{path[0].key}{_pytree.keystr(path[1:])}", leaf) for path, leaf in leaves]


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which it is a view, or itself."""
    return tensor if tensor._base is None else tensor._base
