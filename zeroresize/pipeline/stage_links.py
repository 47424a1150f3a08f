"""What messages between the stages take by now, measured again and again, as bandwidth may change."""

from __future__ import annotations

from itertools import chain

from zeroresize.measure.links import measure_neighbour_links
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.replicas import PipelineReplicas
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.message_delays import PipelineMessages, RunningLinks

#: Smaller messages are measured as if they had so many bytes, as a link's bandwidth cannot be told by less.
_LEAST_BYTES = 2**12


class StageLinks:
    """Measures the links of a pipeline over which activations and gradients travel, and averages what varies.

    Args:
        pipeline: whose shapes are known when it measures.
        replicas: pipelines beside this one, of which the slowest link counts; None for none.
    """

    def __init__(self, pipeline: Pipeline, replicas: PipelineReplicas | None) -> None:
        self._pipeline, self._replicas = pipeline, replicas
        self._num_stages = 0
        self._running = RunningLinks()

    def measure(self, num_steps: int) -> PipelineMessages:
        """Return what messages take, given what they take now, on every rank; collective, between two steps.

        Args:
            num_steps: of the pipeline in a block, whose messages count together.

        Raises:
            RuntimeError: if a rank does not come within the time limit of the pipeline's group.
        """
        pipeline = self._pipeline
        sizes = pipeline.message_bytes
        usual = max(_LEAST_BYTES, *(round(sizes[layer]) for layer in pipeline.boundaries[1:-1]), 0)
        if pipeline.num_stages != self._num_stages:
            self._num_stages, self._running = pipeline.num_stages, RunningLinks()
        links = measure_neighbour_links(pipeline.process_group, pipeline.device, num_bytes=usual)
        if self._replicas is not None:
            numbers = self._replicas.gather_most(
                *chain.from_iterable((link.seconds_per_byte, link.fixed_s) for link in links)
            )
            links = tuple(MoveCost(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
        in_block = tuple(
            MoveCost(num_steps * link.seconds_per_byte, num_steps * link.fixed_s) for link in self._running.after(links)
        )
        return PipelineMessages(in_block, sizes)
