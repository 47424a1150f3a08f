"""The programs of language models, as small as they can be, and the same training undivided."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch

from helpers.sleeping_layers import clock_of
from lm_examples import pace, train
from lm_examples.config import READER
from lm_examples.data import Files
from lm_examples.gpt import ModelConfig
from lm_examples.pipeline_feed import PipelineFeed
from zeroresize.measure import clocks
from zeroresize.pipeline import Pipeline, measuring, move_layers, moving_layers
from zeroresize.utils.files import read_json_lines

MICRO, BATCH = 4, 8
#: Boundaries of six layers to move to, by the number of stages; home first.
BOUNDARIES = {1: [(0, 6)], 2: [(0, 3, 6), (0, 5, 6), (0, 1, 6)], 3: [(0, 2, 4, 6), (0, 1, 5, 6), (0, 3, 4, 6)]}


def model_of(**shape):
    return ModelConfig(**({"num_blocks": 4, "hidden_size": 8, "num_heads": 2, "context": 8, "vocabulary": 11} | shape))


def layers_of(case, seed=0):
    """The same layers at every call, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        blocks = [case.block(number) for number in range(case.model.num_blocks)]
        return [layer.double() for layer in (case.embedding(), *blocks, case.head())]


def batch(model, step, size=BATCH):
    """Tokens of one batch, and those that follow them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(model.vocabulary, (size, model.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Run:
    """A case in training on one stage.

    Attributes:
        losses: of all steps, on the last stage.
        has_changed: what ``after_step`` has told.
    """

    def __init__(self, group, case, lr=0.02, **options):
        self.case = case
        self.pipeline = Pipeline(
            layers_of(case),
            case.loss,
            num_microbatches=MICRO,
            process_group=group,
            boundaries=BOUNDARIES[group.size()][0] if case.model.num_blocks == 4 else None,
            **options,
        )
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=lr)
        self.num_steps, self.losses, self.has_changed = 0, [], []

    def train(self, num_steps, moves=False):
        """``moves``: whether layers move behind every step."""
        for _ in range(num_steps):
            tokens, following = batch(self.case.model, self.num_steps)
            self.optimizer.zero_grad()
            loss = self.pipeline.step(tokens, target=following)
            self.optimizer.step()
            self.num_steps += 1
            if loss is not None:
                self.losses.append(loss.item())
            loss_value = None if loss is None else loss.item()
            self.has_changed.append(self.case.after_step(self.pipeline, self.optimizer, self.num_steps, loss_value))
            if moves:
                places = BOUNDARIES[self.pipeline.num_stages]
                move_layers(self.pipeline, places[self.num_steps % len(places)], optimizer=self.optimizer)
        return self

    @property
    def present(self):
        return [self.pipeline.layers[number] for number in self.pipeline.present]

    def saved(self):
        """A checkpoint of this stage."""
        parameters = dict(self.pipeline.named_parameters())
        return copy.deepcopy(
            {
                "layers": self.pipeline.state_dict(),
                "optimizer": {
                    name: self.optimizer.state[parameter]
                    for name, parameter in parameters.items()
                    if parameter.numel() and parameter in self.optimizer.state
                },
                "case": self.case.state_dict(),
                "num_steps": self.num_steps,
            }
        )

    def load(self, saved):
        self.pipeline.load_state_dict(saved["layers"])
        parameters = dict(self.pipeline.named_parameters())
        for name, state in saved["optimizer"].items():
            self.optimizer.state[parameters[name]].update(state)
        self.case.load_state_dict(saved["case"])
        self.num_steps = saved["num_steps"]
        return self


def check_that_moves_change_nothing(run_ranks, make_case, num_steps, num_ranks=2, tolerance=1e-10, **options):
    """Losses on several stages with moves behind every step equal those of one stage; returns those."""

    def check(rank, group, moves):
        run = Run(group, make_case(), **options).train(num_steps, moves)
        return run.losses, run.has_changed

    ((undivided, changed),) = run_ranks(check, 1, False)
    by_rank = run_ranks(check, num_ranks, True)
    torch.testing.assert_close(by_rank[-1][0], undivided, rtol=tolerance, atol=tolerance)
    assert all(told == changed for _, told in by_rank)
    return undivided


def check_that_saved_runs_go_on(run_ranks, make_case, num_before, num_after, **options):
    """Losses after a checkpoint are those of the run that was not interrupted; returns the figures of both stages."""

    def check(rank, group):
        run = Run(group, make_case(), **options).train(num_before)
        saved = run.saved()
        run.train(num_after)
        again = Run(group, make_case(), **options).load(saved).train(num_after)
        assert again.losses == run.losses[num_before:]
        assert again.case.figures(again.pipeline) == run.case.figures(run.pipeline)
        assert again.has_changed == run.has_changed[num_before:]
        return run.case.figures(run.pipeline)

    return run_ranks(check, 2)


NUM_STEPS = 14


def text_of(seed=0):
    random = torch.Generator().manual_seed(seed)
    letters = bytes(torch.randint(97, 101, (3000,), generator=random).tolist())
    return Files([letters[:2500]], [letters[2500:]])


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
        "pipeline": {"boundaries": "uniform"},
        "balance": {"profile_every": 3, "max_measuring": None},
        "sleep": {"forward_s": 0.01},
        "output": {"folder": str(folder), "progress": False},
    }
    return READER.from_dict(values | {name: values.get(name, {}) | own for name, own in sections.items()})


def keep_time():
    """On this rank only sleeps of blocks take time, by the clock that balancing reads."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    for module in (moving_layers, measuring, clocks, pace):
        module.time = clock_of(lambda: now[0], sleep=sleep)


def trained(config, group, *, resume=False, files=None):
    """The summary of a run on this rank."""
    keep_time()
    with ExitStack() as held:
        feed = train.prepare(config, group, held, resume=resume, files=files or text_of())
        try:
            return train.train(feed)
        finally:
            feed.leave()


def losses_of(folder):
    """By step."""
    return {line["step"]: line["loss"] for line in read_json_lines(folder / "metrics.jsonl")}


def undivided(config):
    """Losses of each step, by step, and the validation loss, of training as anybody would write it."""
    case, batches = config.make_case(), PipelineFeed.batches_of(config, text_of())
    model = torch.nn.Sequential(*config.layers(case=case))

    def loss_of(inputs, target):
        return case.loss(model(inputs), target)

    held_out = [batches.validation(number) for number in range(config.training.validation_batches)]
    return by_hand(config, model, loss_of, batches.training, held_out)


def by_hand(config, layers, loss_of, batch_of, held_out):
    """As :func:`undivided`, of any layers and ``loss_of(*batch)``."""
    training = config.training
    optimizer = torch.optim.AdamW(layers.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    losses = {}
    for step in range(1, training.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(*batch_of(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), training.grad_clip)
        optimizer.step()
        losses[step] = loss.item()
    with torch.no_grad():
        return losses, sum(loss_of(*batch).item() for batch in held_out) / len(held_out)
