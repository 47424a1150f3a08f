"""LoRA's matrices around converted layers become column- and row-parallel layers of this package's.

PEFT makes them of whole layers, or of a rank's part. They are divided, but not balanced: their products are small.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zeroresize.comm.collectives import group_rank
from zeroresize.integrations.lora import is_lora, matrices_of, why_no_lora
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.splitting import part_of_rank
from zeroresize.resharding.parameter_state import replace_data
from zeroresize.utils.torch_private import is_dtensor, parameters_of


def divide_lora(model: nn.Module) -> None:
    """Divide plain matrices that belong to units of converted layers as these are, in place; no collective.

    Raises:
        ValueError: before anything is divided, for a matrix of which it is not known how to.
    """
    plain = [
        (f"{name}.{key}", matrix, module)
        for name, module in model.named_modules()
        if is_lora(module) and isinstance(module.base_layer, BalancedLinear) and module.base_layer.is_converted
        for key, matrix in matrices_of(module).items()
        if type(matrix) is nn.Linear and not is_dtensor(matrix.weight)
    ]
    for name, matrix, wrapper in plain:
        if (why := _why_not(matrix, wrapper)) is not None:
            raise ValueError(f"convert: LoRA's {name} cannot be divided as its layer is: {why}")
    for name, matrix, wrapper in plain:
        _divide(matrix, wrapper.base_layer, name)


def _why_not(matrix: Any, wrapper: Any) -> str | None:
    layer = wrapper.base_layer
    held, here = (shape[layer.divided_dim] for shape in (matrix.weight.shape, layer.home_shape))
    layouts = getattr(layer, "layouts", None)
    if layer.is_searched:
        return "it came after convert: wrap the model before, and add all adapters"
    if layouts is not None:
        divided, whole = (layouts.y, layouts.x) if layer.is_column_parallel else (layouts.x, layouts.y)
        if not (divided.is_shard(-1) and whole.is_replicate() and layouts.is_y_local):
            return "the layer does not read and write plain tensors of whole sequences"
    if held != here and not (held == layer.whole_size and layer.parts):
        return f"it has {held} features there, of which this rank has {here}, and all ranks {layer.whole_size}"
    return why_no_lora(wrapper) or (None if matrix.weight.grad is None else "it has a gradient: convert before")


def _divide(matrix: Any, layer: Any, name: str) -> None:
    dim, rank, is_column = layer.divided_dim, group_rank(layer.process_group), layer.is_column_parallel
    if matrix.weight.shape[dim] != layer.home_shape[dim]:
        for key, parameter in parameters_of(matrix).items():
            if parameter is not None and (key == "weight" or is_column):
                part = part_of_rank(parameter, dim, layer.parts, layer.home, rank, layer.begins)
                replace_data(parameter, part, None)
    matrix.__class__ = ColumnParallelLinear if is_column else RowParallelLinear
    setattr(matrix, "out_features" if is_column else "in_features", layer.whole_size)
    matrix.process_group, matrix.gather_output = layer.process_group, False
    matrix.input_is_parallel = getattr(layer, "input_is_parallel", True)
    matrix.parts, matrix.division, matrix.begins, matrix.block = layer.parts, layer.division, layer.begins, layer.block
    matrix.prepare_balancing()
    matrix.name_in_model = name
