"""Why selectors differ: how wrong a product becomes without the columns that each of them leaves out.

    ZERORESIZE_CIFAR10=path torchrun --nproc-per-node 1 -m scripts.bench.selector_errors

Trains the model of the accuracy studies at full work, by AdamW and by SGD, and after every epoch asks of each balanced
layer: by how much does y = x wᵀ of the next batch change, ‖y − y_kept‖ / ‖y‖, without the share γ of columns that come
first at random, by δ (least moved in the epoch), and by activation norms? And how much do δ and the activation score
differ from column to column (standard deviation over mean)? Means over the layers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from scripts.bench.common import save
from vit_examples.config_file import load_config
from vit_examples.data import load_splits, training_batches
from vit_examples.host_torch import TorchHost
from vit_examples.model import classification_loss
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure.column_statistics import ActivationNorms, WeightVariation
from zeroresize.policy.tensor.columns.order import random_order

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
MEASURED = ("random", "δ", "activation", "spread of δ", "spread of activation")
Scores = NDArray[np.float64]


def relative_error(x_TK: Tensor, w_NK: Tensor, left_out: NDArray[np.int64]) -> float:
    """‖x[:, left_out] w[:, left_out]ᵀ‖ / ‖x wᵀ‖."""
    missing = x_TK[:, left_out] @ w_NK[:, left_out].t()
    return float(missing.norm() / (x_TK @ w_NK.t()).norm())


def inputs_of(host: TorchHost, layers: Mapping[str, BalancedLinear], images: Tensor) -> dict[str, Tensor]:
    """x [T, K] of every layer in a forward of ``images``."""
    inputs: dict[str, Tensor] = {}
    for name, layer in layers.items():
        layer.watch_input = lambda x, name=name: inputs.update({name: x.detach().reshape(-1, x.shape[-1])})
    with torch.no_grad():
        host.forward(images)
    for layer in layers.values():
        layer.watch_input = None
    return inputs


def measure(
    layers: Mapping[str, BalancedLinear],
    inputs: Mapping[str, Tensor],
    variation: Mapping[str, Scores],
    activation: Mapping[str, Scores],
    ratio: float,
) -> dict[str, float]:
    """Means over the layers."""
    errors: dict[str, list[float]] = {name: [] for name in MEASURED}
    for position, (name, layer) in enumerate(layers.items()):
        weight, num_left_out = layer.weight.detach(), round(ratio * layer.num_columns)
        orders = {
            "random": random_order(layer.num_columns, block=1, seed=0, epoch=0, rank=0, layer=position),
            "δ": np.argsort(variation[name]),
            "activation": np.argsort(activation[name]),
        }
        for selector, order in orders.items():
            errors[selector].append(relative_error(inputs[name], weight, order[:num_left_out]))
        for kind, scores in (("spread of δ", variation[name]), ("spread of activation", activation[name])):
            errors[kind].append(float(scores.std() / scores.mean()))
    return {name: statistics.fmean(values) for name, values in errors.items()}


def train(optimizer: str, epochs: int, ratio: float, max_steps: int | None) -> list[dict[str, float]]:
    """What :func:`measure` finds after each epoch, with the mean loss of its steps."""
    config = load_config("cifar_small", ["host=torch"])
    pictures, _ = load_splits(config.data, config.model)
    TorchHost.join(config)
    host = TorchHost(config)
    host.optimizer = OPTIMIZERS[optimizer](host.model.parameters())
    layers = {name: module for name, module in host.model.named_modules() if isinstance(module, BalancedLinear)}
    variation, activation = WeightVariation(layers, storage="host"), ActivationNorms(layers, sample_every=10)
    epochs_errors, step = [], 0
    for epoch in range(epochs):
        losses = []
        batches = training_batches(pictures, config.training.batch_size, seed=0, epoch=epoch)
        for number, (images, labels) in enumerate(batches):
            if number == max_steps:
                break
            activation.begin_step(step)
            loss = classification_loss(host.forward(images), labels, config.model.num_labels)
            host.backward(loss)
            host.step()
            losses.append(loss.item())
            step += 1
        scores = variation.take(), activation.take()
        images, _ = next(training_batches(pictures, config.training.batch_size, seed=0, epoch=epoch + 1))
        errors = measure(layers, inputs_of(host, layers, images), *scores, ratio)
        epochs_errors.append({"loss": statistics.fmean(losses), **errors})
    dist.destroy_process_group()
    return epochs_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.5, help="γ")
    parser.add_argument("--max-steps", type=int, help="of an epoch")
    arguments = parser.parse_args()
    table = Table("optimizer", "epoch", "loss", *MEASURED, title=f"‖y − y_kept‖ / ‖y‖ at γ = {arguments.ratio:g}")
    rows = []
    for optimizer in OPTIMIZERS:
        errors_of_epochs = train(optimizer, arguments.epochs, arguments.ratio, arguments.max_steps)
        for epoch, values in enumerate(errors_of_epochs):
            table.add_row(optimizer, str(epoch), *(f"{value:.3f}" for value in values.values()))
            rows.append({"optimizer": optimizer, "epoch": epoch, **values})
    Console(width=120).print(table)
    save("selector_errors", {"arguments": vars(arguments), "rows": rows})


if __name__ == "__main__":
    main()
