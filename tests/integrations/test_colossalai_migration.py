"""Migration in Colossal-AI's ViT: losses and all gradients are those of the model in which nothing migrates."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.hosts import Host, batch, small_vit
from helpers.virtual_training import VirtualTime, keep_time

import zeroresize as zr
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.convert import balanced_layers

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}


pytestmark = [pytest.mark.usefixtures("colossalai_vit_modules"), pytest.mark.slow]


def relative_errors(pairs):
    """Of each tensor, relative to its norm; to a thousandth of all tensors' norm where its own is rounding alone (keys'
    biases have no gradient: a softmax does not feel them)."""
    least = 1e-3 * torch.stack([expected.norm() for expected, _ in pairs]).norm()
    return [((found - expected).norm() / expected.norm().clamp_min(least)).item() for expected, found in pairs]


def divisible_vit(dtype):
    """One block, whose heads and features divide by 2, 3 and 4 ranks, as the labels do."""
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 96, "num_labels": 12}
    return small_vit(**sizes, num_hidden_layers=1, attn_implementation="sdpa").to(dtype)


class Training:
    """A sharded ViT, plain or with columns that migrate as ``config`` says."""

    def __init__(self, host, dtype, **config):
        self.model = host.shard(divisible_vit(dtype))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.balancer = None
        if config:
            config = zr.BalanceConfig(mode="mig", **config)
            zr.convert(self.model, process_group=host.group)
            self.balancer = zr.Balancer(self.model, self.optimizer, process_group=host.group, config=config)

    def accumulate(self, batches, step):
        """The losses of a step's micro-batches; gradients add up."""
        if step % 2:
            self.model.gradient_checkpointing_enable({"use_reentrant": step == 3})
        else:
            self.model.gradient_checkpointing_disable()
        losses = []
        for images, labels in batches:
            loss = F.cross_entropy(self.model(images.requires_grad_(True)).logits, labels)
            loss.backward()
            losses.append(loss.item())
        return losses

    def gradients(self):
        return [weight.grad for weight in self.model.parameters() if weight.grad is not None]

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.balancer is not None:
            self.balancer.step()


def errors_of_steps(group, dtype, owners, settings):
    """Relative differences of losses and gradients over five steps; two are checkpointed, two accumulate, one both.

    The largest of each setting (way of migrating, γ), all of them beside one plain model.
    """
    host = Host(group)
    plain = Training(host, dtype)
    migrated = {
        (way, ratio): Training(host, dtype, migration_transport=way, ratio=ratio, ranks=owners)
        for way, ratio in settings
    }
    errors = dict.fromkeys(migrated, 0.0)
    for step in range(5):
        batches = [batch(10 * step + micro_batch, dtype) for micro_batch in range(2 if step >= 3 else 1)]
        expected = plain.accumulate(batches, step)
        for setting, training in migrated.items():
            losses = training.accumulate(batches, step)
            of_losses = [abs(found / loss - 1.0) for loss, found in zip(expected, losses, strict=True)]
            pairs = list(zip(plain.gradients(), training.gradients(), strict=True))
            errors[setting] = max(errors[setting], *of_losses, *relative_errors(pairs))
        for training in (plain, *migrated.values()):
            training.step()
    for training in migrated.values():
        metrics = training.balancer.metrics()
        assert metrics["balance/lent_share"] + metrics["balance/borrowed_share"] > 0.0
    return errors


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("num_ranks", "owners", "dtype"),
    [
        (2, [0], torch.float64),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(3, [1], torch.float64), (4, [0, 3], torch.float64), (3, [0, 2], torch.float32)]
        ),
    ],
)
def test_training_is_exact(run_ranks, num_ranks, owners, dtype):
    settings = list(itertools.product(MIGRATION_TRANSPORTS, (0.25, 0.5, 0.75, 1.0)))
    train = lambda rank, group: errors_of_steps(group, dtype, owners, settings)  # noqa: E731
    for errors in run_ranks(train, num_ranks, timeout_s=110):
        assert max(errors.values()) <= EXACT[dtype], errors


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
def test_loans_that_follow_a_straggler_change_nothing(run_ranks, migration_transport):
    """The loop is closed: the straggler changes in the middle of an epoch, and the loans after it."""

    def train(rank, group):
        host = Host(group)
        plain, balanced = (
            Training(host, torch.float64, **settings)
            for settings in ({}, {"migration_transport": migration_transport, "update_every": 3})
        )
        time = VirtualTime(gather_s=0.0)
        keep_time(time, balanced_layers(balanced.model).values())
        owners, errors = [], []
        for step in range(24):
            time.chi = 4.0 if rank == (1 if step < 12 else 0) else 1.0
            time.now += 1e-3  # what is not a product
            batches = [batch(step, torch.float64)]
            expected, losses = plain.accumulate(batches, step), balanced.accumulate(batches, step)
            pairs = list(zip(plain.gradients(), balanced.gradients(), strict=True))
            errors += [abs(losses[0] / expected[0] - 1.0), *relative_errors(pairs)]
            plain.step()
            balanced.step()
            owners.append([loan.owner for loan in balanced.balancer.plan.loans])
        return owners[11], owners[-1], max(errors)

    for first, then, error in run_ranks(train, 3, timeout_s=110):
        assert (first, then) == ([1], [0])
        assert error <= EXACT[torch.float64]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("precision", "migration_transport"),
    [
        ("fp32", "scatter-gather"),
        pytest.param("fp32", "broadcast-reduce", marks=pytest.mark.slow),
        pytest.param("bf16", "scatter-gather", marks=pytest.mark.slow),
        ("bf16", "broadcast-reduce"),
    ],
)
def test_training_under_booster_is_exact(run_ranks, migration_transport, precision):
    """Booster wraps the model in DDP even where there is one replica."""

    def train(rank, group):
        host = Host(group)
        losses, gradients = [], []
        for config in (
            zr.BalanceConfig(mode="off"),
            zr.BalanceConfig(mode="mig", migration_transport=migration_transport, ratio=0.5, ranks=[1]),
        ):
            run = host.boost(small_vit(num_labels=8), precision=precision)
            zr.convert(run.model, process_group=run.group)
            balancer = zr.Balancer(run.model, run.optimizer, process_group=run.group, config=config)
            losses_of_run = []
            for step in range(4):
                images, labels = batch(step)
                loss = F.cross_entropy(run.model(images).logits.float(), labels)
                run.booster.backward(loss, run.optimizer)
                if step == 0:
                    grads = [weight.grad for weight in run.model.parameters()]
                    gradients.append([grad.clone().float() for grad in grads if grad is not None])
                run.optimizer.step()
                run.optimizer.zero_grad()
                balancer.step()
                losses_of_run.append(loss.item())
            balancer.close()
            losses.append(losses_of_run)
        return losses, max(relative_errors(list(zip(*gradients, strict=True))))

    exact, of_losses = (1e-5, 1e-3) if precision == "fp32" else (0.05, 0.05)  # AdamW magnifies rounding step by step
    for (expected, actual), error in run_ranks(train, 2):
        assert error <= exact
        assert actual == pytest.approx(expected, rel=of_losses)
