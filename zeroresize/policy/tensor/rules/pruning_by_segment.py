"""What a rank prunes in each segment, where whole units gave it another share of one than of the next.

Ranks meet after every segment, so time that is spared in one makes up for nothing in another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def pruned_by_segment(pruned: float, lent: float, owned: Sequence[float], works: Sequence[float]) -> tuple[float, ...]:
    """Return which share of what it owns in each segment a rank prunes: it computes equally much in all of them.

    In a segment in which it owns less than that it prunes nothing. In all, ``pruned`` of what it owns is pruned.

    Args:
        pruned, lent: shares of all that it owns; what is lent is the same share of every segment.
        owned: what it owns in each segment, relative to even shares there.
        works: share of a rank's products at even shares that lies in each.
    """
    if pruned == 0.0 or len(set(owned)) <= 1:
        return (pruned,) * len(owned)
    wanted = (1.0 - lent - pruned) * math.fsum(share * work for share, work in zip(owned, works, strict=True))
    left, level = math.fsum(works), 0.0
    for share, work in sorted(zip(owned, works, strict=True)):
        level = wanted / left
        if level <= share * (1.0 - lent):
            break
        wanted -= work * share * (1.0 - lent)
        left -= work
    return tuple(max(1.0 - lent - level / share, 0.0) if share > 0.0 else 0.0 for share in owned)
