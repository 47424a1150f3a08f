"""Training of vision transformers with balanced tensor parallelism: configurations, hosts, data and the loop."""

import os
import signal
import sys
from types import TracebackType


def end_program(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in one line, on one rank, that Ctrl-C has ended this program, with status 130; for ``sys.excepthook``."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("interrupted\n")
    sys.exit(128 + signal.SIGINT)


if sys.argv[:1] == ["-m"]:  # Python looks for a program in this package, or in one that imports it
    sys.excepthook = end_program
