"""Steps without gradients are refused on every rank, before any message, and training goes on."""

import pytest
import torch
from helpers.pipelines import MICRO, batch, pipeline_of


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_on_every_rank(run_ranks, schedule, off):
    def check(rank, group):
        pipeline = pipeline_of(group, schedule=schedule)
        inputs, target = batch(0)
        with off(), pytest.raises(ValueError, match=r"step\(\) trains, but gradients are off .* pipeline\.evaluate"):
            pipeline.step(inputs, target=target)
        assert pipeline.num_steps == 0
        parts = [[part] for part in inputs.chunk(MICRO)]
        with off(), pytest.raises(ValueError, match=r"step_microbatches\(\) trains, but gradients are off"):
            pipeline.step_microbatches(parts, target.chunk(MICRO))
        assert (pipeline.evaluate(inputs) is None) == (rank == 0)
        return (pipeline.step(inputs, target=target) is None) == (rank == 0)

    assert run_ranks(check, 2) == [True, True]
