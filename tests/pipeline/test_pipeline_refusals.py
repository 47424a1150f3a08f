"""What pipelines, and strategies, refuse: references to another layer's weight, and batches without samples."""

import itertools
from functools import partial

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.pipelines import MICRO, batch, pipeline_of
from torch import nn
from torch.nn import functional

from zeroresize.pipeline import Pipeline
from zeroresize.strategy import Strategy, SwitchableModel

pytestmark = pytest.mark.same_ranks

WIDTH = 4


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), weight

    def forward(self, x, *_):
        return functional.linear(self.norm(x), self.weight())


class Holder:
    def __init__(self, module):
        self.module = module

    def weight(self):
        return self.module.weight


def local_class(embedding):
    class Local(nn.Module):
        def forward(self, x, *_):
            return functional.linear(x, embedding.weight)

    return Local()


class Listed(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = [embedding]

    @property
    def weight(self):
        return self.embedding[0].weight

    def forward(self, x, *_):
        return functional.linear(x, self.weight)


HEADS = [
    Listed,
    local_class,
    lambda embedding: Head(lambda: embedding.weight),
    lambda embedding: Head(partial(getattr, embedding, "weight")),
    lambda embedding: Head(Holder(embedding).weight),
]


def layers_with(head):
    embedding = nn.Embedding(WIDTH, WIDTH)
    return [embedding, nn.Linear(WIDTH, WIDTH), head(embedding)]


@on_ranks(2)
def test_references_to_another_layer_are_refused(rank, group):
    texts = []
    for head in HEADS:
        torch.manual_seed(0)
        with pytest.raises(ValueError, match="are one parameter") as pipeline:
            Pipeline(layers_with(head), functional.mse_loss, num_microbatches=2, process_group=group)
        with pytest.raises(ValueError, match="are one parameter") as strategy:
            SwitchableModel(layers_with(head), strategies=[Strategy(1, 2)], process_group=group)
        texts += [str(pipeline.value), str(strategy.value)]
    Pipeline(layers_with(lambda _: Head(lambda: torch.eye(WIDTH))), functional.mse_loss, num_microbatches=2,
             process_group=group)  # fmt: skip
    assert all("layers.0.weight" in text and "layers.2" in text for texts in gathered(group, texts) for text in texts)


@on_ranks(2)
def test_a_pipeline_refuses_a_batch_without_samples_on_every_rank(rank, group):
    given = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    kinds = []
    for schedule in ("1f1b", "gpipe"):
        for is_first in (True, False):
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
            pipeline = Pipeline(layers, functional.mse_loss, num_microbatches=2, process_group=group, schedule=schedule)
            if not is_first:
                pipeline.step(given[0], target=given[1])
            with pytest.raises(ValueError, match="samples"):
                pipeline.step(given[0][:0], target=given[1][:0])
            if schedule == "1f1b":
                with pytest.raises(ValueError, match="micro-batches \\[1\\] of 2 have no samples"):
                    pipeline.step_microbatches([given[:1], (given[0][:0],)], [given[1], given[1][:0]])
            pipeline.step(given[0], target=given[1])  # it goes on
            kinds.append(str(schedule))
    assert len(kinds) == 4


@on_ranks(2)
def test_a_step_without_gradients_is_refused_on_every_rank_before_any_message(rank, group):
    for schedule, off in itertools.product(("1f1b", "gpipe"), (torch.no_grad, torch.inference_mode)):
        pipeline = pipeline_of(group, schedule=schedule)
        inputs, target = batch(0)
        with off(), pytest.raises(ValueError, match=r"step\(\) trains, but gradients are off"):
            pipeline.step(inputs, target=target)
        assert pipeline.num_steps == 0
        parts = [[part] for part in inputs.chunk(MICRO)]
        with off(), pytest.raises(ValueError, match=r"step_microbatches\(\) trains, but gradients are off"):
            pipeline.step_microbatches(parts, target.chunk(MICRO))
        assert (pipeline.evaluate(inputs) is None) == (rank == 0)
        assert (pipeline.step(inputs, target=target) is None) == (rank == 0)
