"""Small GPTs whose work changes, trained in pipelines with layers that move, and as one stage."""

import copy

import torch

from lm_examples.gpt import ModelConfig
from zeroresize.pipeline import Pipeline, move_layers

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
            told = None if loss is None else loss.item()
            self.has_changed.append(self.case.after_step(self.pipeline, self.optimizer, self.num_steps, told))
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
                    name: self.optimizer.state[one]
                    for name, one in parameters.items()
                    if one.numel() and one in self.optimizer.state
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
    """Losses after a checkpoint are those of the run that was not interrupted."""

    def check(rank, group):
        run = Run(group, make_case(), **options).train(num_before)
        saved = run.saved()
        run.train(num_after)
        again = Run(group, make_case(), **options).load(saved).train(num_after)
        assert again.losses == run.losses[num_before:]
        assert again.case.figures(again.pipeline) == run.case.figures(run.pipeline)
        assert again.has_changed == run.has_changed[num_before:]

    run_ranks(check, 2)
