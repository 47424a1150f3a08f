"""How long instructions of a pipeline's step take, by events: what plans expect is held against it."""

import heapq

from zeroresize.runtime.instructions import Kind


def step_by_events(stages, forward_s, backward_s):
    """Seconds of a step: stages go on when they can, a message is there when both its sides have started it.

    Args:
        stages: [stages] instructions.
        forward_s, backward_s: [micro-batches, stages].
    """
    place, free_s, started, arrived = [0] * len(stages), [0.0] * len(stages), {}, {}
    queue = [(0.0, stage) for stage in range(len(stages))]
    while queue:
        now, stage = heapq.heappop(queue)
        now = max(now, free_s[stage])
        while place[stage] < len(stages[stage]):
            kind, number = stages[stage][place[stage]]
            boundary = (stage, stage + kind.peer) if kind.peer > 0 else (stage + kind.peer, stage)
            message = boundary, "ACT" in kind.name, number
            if kind.computes:
                now += (forward_s if kind is Kind.FORWARD else backward_s)[number, stage]
            elif kind.starts:
                if message in started:
                    arrived[message] = max(now, started[message])
                    heapq.heappush(queue, (arrived[message], stage + kind.peer))
                else:
                    started[message] = now
            elif message not in arrived:
                break
            else:
                now = max(now, arrived[message])
            place[stage] += 1
        free_s[stage] = now
    assert place == [len(stage) for stage in stages]
    return max(free_s)
