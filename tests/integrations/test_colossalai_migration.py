"""Migration in Colossal-AI's ViT: losses and all gradients are those of the model in which nothing migrates."""

import pytest
import torch
import torch.nn.functional as F
from helpers.hosts import Host, batch, small_vit

import zeroresize as zr

pytestmark = [pytest.mark.usefixtures("colossalai_vit_modules"), pytest.mark.slow]


def relative_errors(pairs):
    """Of each tensor, relative to its norm; to a thousandth of all tensors' norm where its own is rounding alone (keys'
    biases have no gradient: a softmax does not feel them)."""
    least = 1e-3 * torch.stack([expected.norm() for expected, _ in pairs]).norm()
    return [((found - expected).norm() / expected.norm().clamp_min(least)).item() for expected, found in pairs]


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
