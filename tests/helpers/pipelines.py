"""A small model of layers for pipelines, its undivided training, and what a stage holds."""

import copy
import functools

import torch
from torch import nn

from zeroresize.pipeline import Pipeline, clip_grad_norm_

WORDS, WIDTH, LENGTH, BATCH, MICRO = 11, 6, 3, 8, 4
NUM_LAYERS = 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Drifting(nn.Module):
    """Its buffer, a new object at every forward, and its gain both change what it returns."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("unused", None)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 1))
        return self.gain * (x - self.mean)


class Transposed(nn.Module):
    """What it returns is not contiguous; its weight is not either, and its statistics are buffers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm((x @ self.weight).transpose(1, 2)).transpose(1, 2)


def layers_of(seed=0):
    """The same layers at every call, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Embedding(WORDS, WIDTH), Block(), Drifting(), Transposed(), Block(), Block()]
        return [layer.double() for layer in (*layers, nn.Linear(WIDTH, WORDS))]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
    return words[0], words[1]


def loss_of(outputs, target):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())


def groups_of(named_parameters):
    """As many programs choose them: matrices in the first one, with weight decay and another learning rate."""
    parameters = [one for _, one in named_parameters]
    return [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": 0.1, "lr": 0.02},
        {"params": [one for one in parameters if one.dim() < 2]},
    ]


OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW, foreach, amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),  # its state has other shapes
}
#: Home first; by the number of stages.
BOUNDARIES = {
    1: [(0, 7)],
    2: [(0, 3, 7), (0, 6, 7), (0, 1, 7)],
    3: [(0, 2, 4, 7), (0, 1, 6, 7), (0, 4, 5, 7)],
    4: [(0, 2, 4, 6, 7), (0, 1, 2, 3, 7), (0, 4, 5, 6, 7)],
}


def pipeline_of(group, boundaries=None, loss=loss_of, layers=None, **options):
    return Pipeline(
        layers_of() if layers is None else layers,
        loss,
        num_microbatches=MICRO,
        process_group=group,
        boundaries=boundaries or BOUNDARIES[group.size()][0],
        **options,
    )


def half_the_loss(outputs, target):
    return loss_of(outputs, target) / 2


def undivided(make, num_steps, max_norm):
    """Losses, and weights and optimizer state by name, of training with two batches added up for each step."""
    model = nn.ModuleDict({"layers": nn.ModuleList(layers_of())})
    optimizer = make(groups_of(model.named_parameters()))
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(2):
            total = 0.0
            words, target = batch(2 * step + part)
            for x, y in zip(words.chunk(MICRO), target.chunk(MICRO), strict=True):
                for layer in model["layers"]:
                    x = layer(x)
                loss = half_the_loss(x, y) / MICRO
                loss.backward()
                total += loss.item()
            losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        decay.step()
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": torch.as_tensor(one) for key, one in optimizer.state.get(parameter, {}).items()}
    return losses, found


def held(pipeline, optimizer):
    """Everything of this stage's layers by name, copied."""
    found = {name: copy.deepcopy(value) for name, value in pipeline.state_dict().items()}
    for name, parameter in pipeline.named_parameters():
        if parameter.grad is not None:
            found[f"{name} gradient"] = parameter.grad.clone()
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        found |= {f"{name} {key}": copy.deepcopy(one) for key, one in state.items()}
    return found


def train_step(pipeline, optimizer, step, max_norm=None, between=lambda: None):
    """Two batches for one step of the optimizer; their losses on the last stage."""
    optimizer.zero_grad()
    losses = []
    for part in range(2):
        words, target = batch(2 * step + part)
        losses.append(pipeline.step(words, target=target))
        if part == 0:
            between()
    if max_norm is not None:
        clip_grad_norm_(pipeline, max_norm)
    optimizer.step()
    return [loss.item() for loss in losses if loss is not None]


def assert_same(ones, others):
    """Bit for bit."""
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        other = others[name]
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), name
            assert one.dtype == other.dtype and one.stride() == other.stride(), name
        else:
            assert one == other, name
