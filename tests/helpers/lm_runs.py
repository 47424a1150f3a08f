"""Trainings of a tiny GPT on a clock that only its sleeps move, and the same training undivided."""

import types

import torch

from lm_examples import pace
from lm_examples.build import build_layers
from lm_examples.config_file import config_from_dict
from lm_examples.data import Text, batches_of
from lm_examples.run import prepare
from lm_examples.train import train
from zeroresize.pipeline import moving, profiling
from zeroresize.utils.json_lines import read_json_lines

NUM_STEPS = 14


def text_of(seed=0):
    random = torch.Generator().manual_seed(seed)
    letters = torch.randint(97, 101, (3000,), generator=random, dtype=torch.uint8)
    return Text(letters[:2500], letters[2500:])


def config_of(folder, **sections):
    """A tiny model; ``sections`` change single keys of theirs."""
    values = {
        "model": {"num_blocks": 6, "hidden_size": 8, "num_heads": 2, "context": 8},
        "training": {
            "steps": NUM_STEPS,
            "batch_size": 8,
            "micro_batches": 4,
            "lr": 0.01,
            "grad_clip": 0.5,
            "dtype": "float64",
            "log_every": 1,
            "validation_batches": 2,
        },
        "balance": {"profile_every": 3},
        "sleep": {"forward_s": 0.01},
        "output": {"folder": str(folder), "progress": False},
    }
    return config_from_dict(values | {name: values.get(name, {}) | own for name, own in sections.items()})


def keep_time():
    """On this rank only sleeps of blocks take time, by the clock that balancing reads."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    for module in (moving, profiling, pace):
        module.time = types.SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)


def trained(config, group, *, resume=False):
    """The summary of a run on this rank."""
    keep_time()
    run = prepare(config, text_of(), group, resume=resume)
    with run.held:
        return train(run)


def losses_of(folder):
    """By step."""
    return {line["step"]: line["loss"] for line in read_json_lines(folder / "metrics.jsonl")}


def undivided(config):
    """Losses of each step, by step, and the validation loss, of training as anybody would write it."""
    case, batches, training = config.make_case(), batches_of(config, text_of()), config.training
    model = torch.nn.Sequential(*build_layers(config, case))
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    losses = {}
    for step in range(1, training.steps + 1):
        inputs, target = batches.training(step)
        optimizer.zero_grad()
        loss = case.loss(model(inputs), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        optimizer.step()
        losses[step] = loss.item()
    with torch.no_grad():
        held_out = [batches.validation(number) for number in range(training.validation_batches)]
        validation = [case.loss(model(inputs), target).item() for inputs, target in held_out]
    return losses, sum(validation) / len(validation)
