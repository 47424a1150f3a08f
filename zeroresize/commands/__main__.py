"""``zeroresize COMMAND …``: each command is a module of this folder, which is imported when it is chosen."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import zeroresize
from zeroresize.commands.errors import CommandError
from zeroresize.utils.extras import MissingExtra

#: What each command is for; its module has ``configure(parser)`` and ``run(options)``, which returns the exit status.
COMMANDS = {
    "demo": "train a small model on two ranks of this machine, one slow for a while, off and on",
    "live": "watch a running job by the status that it writes",
    "report": "tell of one or more runs: who was slow, and did balancing pay",
    "probe": "measure every rank before a job: products, memory and links; slow ones are named",
    "whatif": "tell from traces who straggled, and what each mode would have saved",
}
_EXAMPLES = """examples:
  zeroresize demo
  zeroresize live runs/status.jsonl
  torchrun --nproc-per-node 8 -m zeroresize.commands probe

`zeroresize COMMAND --help` tells the rest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 2 for what was given wrongly, 130 after Ctrl-C."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="zeroresize", description=zeroresize.__doc__, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"zeroresize {zeroresize.__version__}")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        chosen.add_parser(name, help=purpose, add_help=False)
    name = parser.parse_known_args(arguments)[0].command
    try:
        module = importlib.import_module(f"zeroresize.commands.{name}")
        of_command = argparse.ArgumentParser(prog=f"zeroresize {name}", description=module.__doc__, formatter_class=raw)
        module.configure(of_command)
        return int(module.run(of_command.parse_args(list(arguments)[list(arguments).index(name) + 1 :])))
    except (CommandError, MissingExtra) as error:
        print(f"zeroresize {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"zeroresize {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
