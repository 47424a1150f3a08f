"""A report is printed in one line, with what a person looks for first; its repr stays that of a dataclass."""

import math

import pytest

from zeroresize.checks.finding import ParallelFinding
from zeroresize.microbatch.trainer import IterationReport
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.switching.switch import SwitchReport
from zeroresize.strategy.trainer import RangeReport, StepReport

SWITCH = SwitchReport(
    seconds=0.25, sent_bytes=3 * 10**6, received_bytes=812, num_rounds=2, buffer_bytes=1, new_bytes=1, peak_bytes=9
)
RANGE = RangeReport(Strategy(tp=2), (1024,), 12, 4096, (3,), 1.5)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (SWITCH, "3 MB sent and 812 B received in 2 rounds, 250 ms"),
        (
            StepReport(2.34567, 4096, 14.78, (RANGE,), (SWITCH, SWITCH), 14780.0),
            "loss 2.346, 4096 tokens, 14.8 s, norm 14780: 12 sequences by (1, 2, 1), 1.5 s; 500 ms for 2 switches",
        ),
        (
            IterationReport(2.5, 100, 0.5, 0.002, 0.4, 0.35, 120, (4, 3), "none", math.inf, True),
            "loss 2.5, 100 tokens, 500 ms, norm inf, skipped: 4+3 micro-batches in 400 ms, 350 ms expected, after 2 ms "
            "for the plan",
        ),
        (ParallelFinding("cause", "w", "", "dropout", "seen", "Mend it"), "cause (w, dropout): seen. Mend it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_report_is_a_line(report, line):
    assert str(report) == line
    assert repr(report).startswith(type(report).__name__)
