"""Migration in Colossal-AI's ViT: losses and all gradients are those of the model in which nothing migrates."""

import pytest
import torch
import torch.nn.functional as F
from colossalai_host import Host
from test_colossalai_vit import batch, small_vit

import zeroresize as zr

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}


pytestmark = pytest.mark.usefixtures("colossalai_vit_modules")


def relative_errors(pairs):
    """Of each tensor, relative to its norm; to a thousandth of all tensors' norm where its own is rounding alone (keys'
    biases have no gradient: a softmax does not feel them)."""
    least = 1e-3 * torch.stack([expected.norm() for expected, _ in pairs]).norm()
    return [((found - expected).norm() / expected.norm().clamp_min(least)).item() for expected, found in pairs]


def errors_of_steps(group, migrate, ratio, owners, dtype):
    """Relative differences of losses and gradients over five steps of two micro-batches, every other checkpointed."""
    host = Host(group)
    plain, migrated = (host.shard(small_vit(num_labels=8, attn_implementation="sdpa").to(dtype)) for _ in range(2))
    config = zr.BalanceConfig(mode="mig", migrate=migrate, ratio=ratio, ranks=owners)
    zr.convert(migrated, process_group=group, config=config)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (plain, migrated)]
    balancer = zr.Balancer(migrated, optimizers[1], process_group=group, config=config)
    errors = []
    for step in range(5):
        for micro_batch in range(2):
            images, labels = batch(10 * step + micro_batch, dtype)
            losses = []
            for model in (plain, migrated):
                if step % 2:
                    model.gradient_checkpointing_enable({"use_reentrant": step == 3})
                else:
                    model.gradient_checkpointing_disable()
                losses.append(F.cross_entropy(model(images.requires_grad_(True)).logits, labels))
                losses[-1].backward()
            errors.append(abs(losses[1].item() - losses[0].item()) / losses[0].item())
        gradients = [
            (one.grad, other.grad) for one, other in zip(plain.parameters(), migrated.parameters(), strict=True)
        ]
        errors += relative_errors([pair for pair in gradients if pair[0] is not None])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        balancer.step()
    assert balancer.metrics()["balance/lent_share"] + balancer.metrics()["balance/borrowed_share"] > 0.0
    return max(errors)


@pytest.mark.parametrize("migrate", ["broadcast-reduce", "scatter-gather"])
@pytest.mark.parametrize(("num_ranks", "owners"), [(2, [0]), (4, [1]), (4, [0, 3])])
@pytest.mark.parametrize(("ratio", "dtype"), [(0.25, torch.float64), (1.0, torch.float64), (0.5, torch.float32)])
def test_training_is_exact(run_ranks, migrate, num_ranks, owners, ratio, dtype):
    errors = run_ranks(lambda rank, group: errors_of_steps(group, migrate, ratio, owners, dtype), num_ranks)
    assert max(errors) <= EXACT[dtype]


@pytest.mark.parametrize("migrate", ["broadcast-reduce", "scatter-gather"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_under_booster_is_exact(run_ranks, migrate, precision):
    """Booster wraps the model in DDP even where there is one replica."""

    def train(rank, group):
        host = Host(group)
        losses, gradients = [], []
        for config in (
            zr.BalanceConfig(mode="off"),
            zr.BalanceConfig(mode="mig", migrate=migrate, ratio=0.5, ranks=[1]),
        ):
            run = host.boost(small_vit(num_labels=8), precision=precision)
            zr.convert(run.model, process_group=run.group, config=config)
            balancer = zr.Balancer(run.model, run.optimizer, process_group=run.group, config=config)
            own = []
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
                own.append(loss.item())
            balancer.close()
            losses.append(own)
        return losses, max(relative_errors(list(zip(*gradients, strict=True))))

    exact, of_losses = (1e-5, 1e-3) if precision == "fp32" else (0.05, 0.05)  # AdamW magnifies rounding step by step
    for (expected, found), error in run_ranks(train, 2):
        assert error <= exact
        assert found == pytest.approx(expected, rel=of_losses)
