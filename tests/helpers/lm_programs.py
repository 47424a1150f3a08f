"""Both language-model programs, as small as they can be, for ranks that are forks."""

from pathlib import Path

from forked_training import forked_training

from lm_examples import train, train_strategies

_SOURCES = Path(__file__).resolve().parents[2] / "lm_examples" / "cases"
PROGRAMS = {
    "pipeline": (train.main, ["--set=model={num_blocks: 2, hidden_size: 8, num_heads: 2, context: 8}"]),
    "strategies": (
        train_strategies.main,
        [
            "--config=switching_two_ranks",
            "--set=model={num_blocks: 2, hidden_size: 8, num_heads: 2, mlp_size: 8}",
            "--set=strategies={static: [1, 2, 1]}",
            "--set=data.max_length=24",
            "--set=training.tokens=48",
            "--set=training.max_tokens=24",
        ],
    ),
}


def ended(program, folder, name, *arguments, before=lambda: None):
    """How a run in ``folder`` has ended; ``name`` is that of the folder for what it says."""
    main, sizes = PROGRAMS[program]
    given = [f"--output={folder}", f"--data={_SOURCES}", *sizes, *arguments]
    return forked_training(given, folder.parent / name, before, main)
