"""Megatron-Core 0.19: its parallel linear layers, balanced in place, and what its attention and MLPs are divided by.

``HybridModel`` and ``GPTModel`` are made of the same local layers. A unit of the fused q, k and v is a group: the heads
that share keys and values, with these, as Megatron-Core lays them out. Layers of TransformerEngine, of experts, of
other versions, and those that add dw to gradients themselves stay as they are.
"""

from __future__ import annotations

from typing import Any, NoReturn

from megatron import core as megatron_core
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.integrations.changed_modules import why_changed
from zeroresize.integrations.hosts import SwappedClasses
from zeroresize.integrations.known_modules import StaysEven, register_segments
from zeroresize.integrations.unit_proof import Between
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import Segment, UnitTensor
from zeroresize.layers.weight_checks import known_layers
from zeroresize.plan.layout import unit_pieces
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.utils.torch_private import parameters_of

_TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"


class _BalancedLayer(BalancedLinear):
    """Holds what the balanced layers of Megatron-Core have in common."""

    bias: Any
    config: Any
    skip_bias_add: bool
    sequence_parallel: bool

    @property
    def _sequence_dim(self) -> int | None:
        return 0 if self.sequence_parallel else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """As the layer's own of Megatron-Core; while units are away, to be saved only, by the units that are here."""
        if self.segment is None or self.segment.owned.is_home:
            beside = known_layers() if sharded_offsets else ()
            for layer in (each for each in beside if isinstance(each, _BalancedLayer) and each.config is self.config):
                if layer.name_in_model.split(".")[-2:] == self.name_in_model.split(".")[-2:]:  # stacked in one tensor
                    layer.require_home(f"sharded_state_dict of {self.name_in_model}, which is evenly divided, and of")
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        this: Any = self
        state = {name: each for name, each in parameters_of(this).items() if each is not None}
        groups = {"tp_group": self.process_group, "dp_cp_group": metadata["dp_cp_group"]}
        made = make_sharded_tensors_for_checkpoint(
            {**state, "_extra_state": None}, prefix, dict(self.unit_dims), sharded_offsets, **groups
        )
        for where in (each for each in self.segment.tensors if each.owner is self):
            name = f"{prefix}{where.attribute}"  # by which the MLP would cut it into gate and up as at home
            made[f"{name} by units"] = self._by_units(made.pop(name), where, self.segment.owned)
        return made

    def _by_units(self, at_home: ShardedTensor, where: UnitTensor, owned: OwnershipMap) -> ShardedTensorFactory:
        """What makes of a weight, or of its state, a shard of each run of neighbouring units in the undivided one."""
        leading, num_units = at_home.prepend_axis_num, len(owned.owners) // where.block
        pieces = unit_pieces(where.held(owned, group_rank(self.process_group)), num_units, where.rows)
        dim = leading + where.dim

        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
            tensor = tensor.detach()[(None,) * leading]
            shape, made = [*at_home.global_shape[:leading], *tensor.shape[leading:]], []
            begin = [*at_home.global_offset[:leading], *[0] * (tensor.dim() - leading)]
            shape[dim] = num_units * sum(where.rows)
            for piece in pieces:
                part = tensor.narrow(dim, piece.local_begin, piece.length).contiguous()
                begin[dim] = piece.begin
                shapes = tuple(part.shape), tuple(shape), tuple(begin)
                made.append(ShardedTensor(key, part, part.dtype, *shapes, None, replica_id))
            return made

        return ShardedTensorFactory(at_home.key, at_home.data, build, self._refuse_loading, at_home.replica_id)

    def _refuse_loading(self, _: Any) -> NoReturn:
        raise RuntimeError(f"{self.name_in_model} has units away: load with all units at home")


class BalancedColumnParallelLinear(_BalancedLayer, ColumnParallelLinear):
    """``ColumnParallelLinear`` (fused q, k and v; FC1) by ``self.plan``: x [S, B, K] → (y [S, B, N], bias or None)."""

    is_column_parallel = True

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if weight is not None or runtime_gather_output:
            self.require_home("a forward with weight= or runtime_gather_output=True of")
            of_host: Any = ColumnParallelLinear.forward(self, input_, weight, runtime_gather_output)
            return of_host
        bias = None if self.skip_bias_add else self.bias
        y = self.column_products(input_, bias, sequence_dim=self._sequence_dim)
        return y, self.bias if self.skip_bias_add else None


class BalancedRowParallelLinear(_BalancedLayer, RowParallelLinear):
    """``RowParallelLinear`` (attention output; FC2) by ``self.plan``: x [S, B, K] → (y [S, B, N], bias or None)."""

    is_column_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.row_products(input_, sequence_dim=self._sequence_dim)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


def _why_left_alone(layer: Any) -> str | None:
    if layer.is_expert:
        return "it is an expert's"
    if layer.explicit_expert_comm:
        return "explicit_expert_comm=True leaves communication to its module, as moe_shared_expert_overlap does"
    if layer.gradient_accumulation_fusion:
        return "gradient_accumulation_fusion=True adds dw to main_grad inside the layer: set it to False"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return f"gtp_remat_size={layer.gtp_remat_size} shards its weight further (generalized tensor parallelism)"
    if getattr(layer, "disable_grad_reduce", False):
        return "disable_grad_reduce=True leaves the sum of dx to somebody else"
    if isinstance(layer, RowParallelLinear) and not layer.input_is_parallel:
        return "input_is_parallel=False"
    return None


def process_group_of(module: Any) -> ProcessGroup:
    """Return the tensor-parallel group of a layer."""
    group: ProcessGroup = getattr(module, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    return group


_adapter = SwappedClasses(
    {ColumnParallelLinear: BalancedColumnParallelLinear, RowParallelLinear: BalancedRowParallelLinear},
    _why_left_alone,
    process_group_of=process_group_of,
    vocabulary_heads=["output_layer"],
)
vocabulary_heads, swap_layer = _adapter.vocabulary_heads, _adapter.swap_layer


def is_parallel_linear(module: nn.Module) -> bool:
    """Tell whether ``module`` is a parallel linear layer of Megatron-Core, or one of TransformerEngine in its place."""
    return _adapter.is_parallel_linear(module) or _is_of_transformer_engine(module)


def why_left_alone(module: Any) -> str | None:
    """Tell why a layer stays as it is, for a log line; None if it can be balanced."""
    if not (version := getattr(megatron_core, "__version__", "of no version")).startswith("0.19."):
        return f"it is of Megatron-Core {version}; 0.19 is known"
    if _is_of_transformer_engine(module):
        return f"TransformerEngine computes a {type(module).__name__}: build the model of local layers"
    return _adapter.why_left_alone(module)


def _is_of_transformer_engine(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__ == _TRANSFORMER_ENGINE and kind.__name__.endswith(("ParallelLinear", "TELinear"))


def _attention(module: Any) -> Segment:
    """Its groups: of each the queries' heads, a head of keys and one of values, one after the other."""
    config, core, size = module.config, module.core_attention, module.hidden_size_per_attention_head
    norms = [norm for norm in (module.q_layernorm, module.k_layernorm) if norm is not None]
    num_groups, num_heads = config.num_query_groups, config.num_attention_heads // config.num_query_groups
    if type(core) is not DotProductAttention:
        raise StaysEven(f"its core attention is a {type(core).__name__}, and DotProductAttention alone is known")
    if config.softmax_type != "vanilla":
        raise StaysEven(f"softmax_type={config.softmax_type!r} has an offset for each head, which would not follow")
    if num_groups < group_size(process_group_of(module.linear_qkv)):
        raise StaysEven(
            f"its {num_groups} groups of keys and values are fewer than the ranks, which gather all of them"
        )

    def set_groups(groups: list[int]) -> None:
        for counting in (module, core):
            counting.num_query_groups_per_partition = len(groups)
            counting.num_attention_heads_per_partition = len(groups) * num_heads
        core.hidden_size_per_partition = len(groups) * num_heads * size

    return Segment(
        [module.linear_qkv],
        module.linear_proj,
        unit_size=num_heads * size,
        parts=1,
        on_change=set_groups,
        min_units=1,
        head_size=size,
        kind="heads" if num_heads == 1 else "KV groups",
        dropouts=[(core.attention_dropout, 1)],
        why_even=lambda: next(filter(None, map(why_changed, (module, core, *norms))), None),
        replicated=[weight for norm in norms for weight in norm.parameters()],  # finalize_model_grads sums gradients
    )


def _mlp(module: Any) -> Segment:
    """Its neurons, where the gate and up layers of gated ones are parts of FC1, and numbers prove its activation."""
    column, row, parts = module.linear_fc1, module.linear_fc2, 2 if module.config.gated_linear_unit else 1
    if isinstance(column, BalancedLinear) and isinstance(row, BalancedLinear):
        try:
            Between(module, {column: (1,) * parts}, row, 1, module, returned=lambda y: (y, None)).require_unmixed()
        except Exception as error:  # whatever an activation makes of the numbers
            raise StaysEven(f"its activation, computed with numbers: {type(error).__name__}: {error}") from error
    return Segment([column], row, parts=parts, min_units=0, kind="neurons")


register_segments(SelfAttention, _attention)
register_segments(MLP, _mlp)
