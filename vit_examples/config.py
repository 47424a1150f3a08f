"""What one training run is: frozen dataclasses, each checked when it is built, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vit_examples.harness.config_reader import ConfigReader
from vit_examples.harness.sections import LONGEST_TIMEOUT_S, CommonOutputConfig, each_at_least
from vit_examples.stragglers import StragglerConfig
from zeroresize.config import BalanceConfig
from zeroresize.utils.value_checks import at_least, divides, is_bool, number, one_of

HOSTS = ("colossalai", "torch")
PRECISIONS = ("fp32", "bf16", "fp16")
LR_SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the vision transformer; 32×32 pictures in patches of 4 are the paper's 65 tokens.

    Attributes:
        mlp_size: hidden units of the feed-forward part; None is four times ``hidden_size``.
        num_labels: classes of the data; hosts pad the classifier to a multiple of the ranks.
        position_std: standard deviation of the first position embeddings. Hugging Face's 0.02 leaves a short run on a
            plateau (60 steps on mnist5k: 30 % right, 80 % with 0.5).
    """

    hidden_size: int = 192
    depth: int = 2
    num_heads: int = 12
    mlp_size: int | None = None
    image_size: int = 32
    patch_size: int = 4
    num_labels: int = 10
    position_std: float = 0.02

    def __post_init__(self) -> None:
        each_at_least("model", self, ("hidden_size", "depth", "num_heads", "image_size", "patch_size", "num_labels"), 1)
        number("model.position_std", self.position_std, least=0.0)
        if self.mlp_size is None:
            object.__setattr__(self, "mlp_size", 4 * self.hidden_size)
        at_least("model.mlp_size", self.mlp_size, 1)
        divides("model.hidden_size", self.hidden_size, "model.num_heads", self.num_heads)
        divides("model.image_size", self.image_size, "model.patch_size", self.patch_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of one picture: its patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    def padded_labels(self, num_ranks: int) -> int:
        """``num_labels`` rounded up to a multiple of ``num_ranks``."""
        return -(-self.num_labels // num_ranks) * num_ranks

    def validate_group_size(self, num_ranks: int) -> None:
        """Raises ValueError where ``num_ranks`` ranks cannot share the model evenly."""
        for key in ("num_heads", "hidden_size", "mlp_size"):
            size = getattr(self, key)
            if size % num_ranks:
                raise ValueError(
                    f"model.{key}={size} is not divisible by the {num_ranks} tensor-parallel ranks: "
                    f"choose a multiple of {num_ranks}, or another number of ranks"
                )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where pictures come from.

    Attributes:
        source: ``mnist5k``, a folder of parquet files (an environment variable such as ``${ZERORESIZE_CIFAR10}`` is
            expanded), or the name of a data set that ``datasets.load_dataset`` reads.
        train_size, test_size: only the first so many pictures of each split; None is all.
        augment: random crops and flips of the training pictures, fixed by seed, epoch and step.
    """

    source: str = "mnist5k"
    train_size: int | None = None
    test_size: int | None = None
    augment: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"data.source={self.source!r}: 'mnist5k', a folder or a data set's name is needed")
        is_bool("data.augment", self.augment)
        each_at_least("data", self, [key for key in ("train_size", "test_size") if getattr(self, key) is not None], 1)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop.

    Attributes:
        epochs: passes over the training pictures.
        max_steps_per_epoch: stop an epoch after so many optimizer steps; None is the whole epoch.
        batch_size: pictures an optimizer step, shared by ``accumulation`` micro-batches.
        lr: AdamW's learning rate after ``warmup_steps`` of linear warm-up (the paper: 3e-3).
        lr_schedule: ``constant``, or ``cosine`` down to zero over all epochs.
        grad_clip: largest norm of all gradients; 0 is off.
        precision: ``fp32``, ``bf16``, or (on a GPU) ``fp16``.
        activation_checkpointing: recompute activations in backward.
    """

    epochs: int = 1
    max_steps_per_epoch: int | None = None
    batch_size: int = 64
    accumulation: int = 1
    lr: float = 1e-3
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.01
    grad_clip: float = 0.0
    precision: str = "fp32"
    activation_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        each_at_least("training", self, ("epochs", "batch_size", "accumulation"), 1)
        each_at_least("training", self, ("warmup_steps", "seed"), 0)
        if self.max_steps_per_epoch is not None:
            at_least("training.max_steps_per_epoch", self.max_steps_per_epoch, 1)
        for key in ("weight_decay", "grad_clip"):
            number("training." + key, getattr(self, key), least=0.0)
        number("training.lr", self.lr, above=0.0)
        one_of("training.precision", self.precision, PRECISIONS)
        one_of("training.lr_schedule", self.lr_schedule, LR_SCHEDULES)
        is_bool("training.activation_checkpointing", self.activation_checkpointing)
        divides("training.batch_size", self.batch_size, "training.accumulation", self.accumulation)


@dataclass(frozen=True, kw_only=True)
class OutputConfig(CommonOutputConfig):
    """What a run leaves behind, under ``folder``; ``save_every`` counts epochs.

    Attributes:
        log_every: steps between two lines of ``metrics.jsonl`` and TensorBoard, each with the mean time of the steps
            since the last one; the last step of an epoch has a line, too. On a GPU also between synchronisations.
        settle_steps: first steps of each start (at most half of its steps) that ``summary.json`` does not time.
    """

    folder: str = "runs/vit"
    log_every: int = 10
    settle_steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("output.log_every", self.log_every, 1)
        at_least("output.settle_steps", self.settle_steps, 0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. ``timeout_s``: seconds after which a collective that does not end fails."""

    host: str = "colossalai"
    timeout_s: float = 600.0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    balance: BalanceConfig = field(default_factory=lambda: BalanceConfig(mode="off"))
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        one_of("host", self.host, HOSTS)
        number("timeout_s", self.timeout_s, above=0.0, most=LONGEST_TIMEOUT_S)
        if self.straggler.pin_ratio is not None:
            try:
                self.balance.pinned(self.straggler.pin_ratio, rank=0)
            except ValueError as error:
                raise ValueError(f"straggler.pin_ratio={self.straggler.pin_ratio!r}: {error}") from error

    def validate_group_size(self, num_ranks: int) -> None:
        """Raises ValueError for what ``num_ranks`` tensor-parallel ranks cannot run."""
        for section in (self.model, self.straggler):
            section.validate_group_size(num_ranks)
        try:
            self.balance.validate_group_size(num_ranks)
        except ValueError as error:
            raise ValueError(f"balance.{error}") from error


READER = ConfigReader(
    program="vit_examples.train",
    description="Train a vision transformer with balanced tensor parallelism. Keys: docs/training.md.",
    kind_of=lambda document: RunConfig,
    folder=Path(__file__).parent / "configs",
    default="demo",
    flags={
        "host": ("host", str),
        "mode": ("balance.mode", str),
        "epochs": ("training.epochs", int),
        "data": ("data.source", str),
        "output": ("output.folder", str),
        "seed": ("training.seed balance.seed", int),
    },
)
load_config = READER.load
