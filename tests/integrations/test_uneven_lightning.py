"""UnevenBatches in Lightning: losses and weights are those of one process, also from a checkpoint; what is refused."""

import time

import pytest
import torch
from helpers.data_parallel import assert_alike, counted_in
from helpers.on_ranks import on_ranks
from helpers.transformers_models import as_rank
from helpers.uneven_trainers import CLIP, GLOBAL_BATCH, SEED, Rows, TakesMeans, trained_by_one_process
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning.pytorch")
UnevenBatches = pytest.importorskip("zeroresize.integrations.lightning").UnevenBatches
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]


class Module(lightning.LightningModule):
    def __init__(self, uneven, dataset, is_scaled=True, is_ours=True):
        super().__init__()
        self.uneven, self.dataset, self.is_scaled, self.is_ours = uneven, dataset, is_scaled, is_ours
        self.model, self.losses, self.seconds = TakesMeans(), [], 0.0

    def train_dataloader(self):
        loader = DataLoader(self.dataset, batch_sampler=self.uneven.balancer.sampler(self.dataset, seed=SEED))
        return self.uneven.batches(loader) if self.is_ours else loader

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=8)

    def validation_step(self, rows, number):
        return self.model(*rows)["loss"]

    def training_step(self, rows, number):
        time.sleep(self.seconds * len(rows[0]))
        loss = self.model(*rows)["loss"]
        if self.is_scaled:
            loss = self.uneven.scaled(loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(folder, callbacks, **options):
    settings = {"strategy": "ddp", "max_epochs": 2, "gradient_clip_val": CLIP, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": len(callbacks) > 1}
    options = settings | quiet | options
    return lightning.Trainer(accelerator="cpu", devices=2, callbacks=callbacks, default_root_dir=folder, **options)


def parts(dataset, folder, *callbacks, num_micro_batches=1, counts=None, is_scaled=True, is_ours=True, **options):
    """A module and its Trainer."""
    uneven = UnevenBatches(global_batch=GLOBAL_BATCH, counts=counts, counted=counted_in)
    module = Module(uneven, dataset, is_scaled, is_ours)
    options = {"accumulate_grad_batches": num_micro_batches} | options
    return module, trainer_of(folder, [uneven, *callbacks], **options)


@on_ranks(2, [(43, 1, (8, 4)), (43, 3, (12, 0)), (43, 3, None), (37, 3, (8, 4))])
def test_weights_are_those_of_one_process_also_from_a_checkpoint(
    rank, group, number, num_micro_batches, counts, *, tmp_path
):
    dataset, folder = Rows(number, masked=True), tmp_path / f"{number}{num_micro_batches}{counts}"
    _, whole = trained_by_one_process(dataset, 2)
    options = {"counts": counts, "num_micro_batches": num_micro_batches}
    saves = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    with as_rank(rank, 2):
        module, trainer = parts(dataset, folder, saves, **options)
        trainer.fit(module)
        assert_alike(dict(module.model.named_parameters()), whole)
        for step in (2, 4, 6):  # within an epoch, and between two
            again, trainer = parts(dataset, folder, **options)
            trainer.fit(again, ckpt_path=folder / f"step={step}.ckpt")
            assert_alike(dict(again.model.named_parameters()), whole)
            assert again.losses == pytest.approx(module.losses[-len(again.losses) :], rel=1e-12)
            trainer.validate(again, ckpt_path=folder / "step=2.ckpt")


@on_ranks(2)
def test_a_trainer_that_fits_again_goes_on(rank, group, *, tmp_path):
    dataset = Rows(43, masked=True)
    with as_rank(rank, 2):
        module, trainer = parts(dataset, tmp_path, counts=(8, 4))
        trainer.fit(module)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
    assert len(module.losses) == 12


@on_ranks(2)
def test_a_slow_rank_is_given_fewer_samples(rank, group, *, tmp_path):
    dataset = Rows(600, masked=True)
    _, whole = trained_by_one_process(dataset, 2)
    with as_rank(rank, 2):
        module, trainer = parts(dataset, tmp_path, limit_val_batches=0)
        module.seconds = 0.001 * (1.0 + 2.0 * rank)
        trainer.fit(module)
    assert_alike(dict(module.model.named_parameters()), whole)
    assert module.uneven.balancer.counts in ((8, 4), (9, 3), (10, 2))


class Accumulates(lightning.Callback):
    """Changes what belongs to a step."""

    def on_train_start(self, trainer, module):
        trainer.accumulate_grad_batches = 2


@on_ranks(2)
def test_what_would_train_wrongly_is_an_error_before_weights_change(rank, group, *, tmp_path):
    dataset, whole = Rows(43, masked=True), dict(TakesMeans().named_parameters())
    plain = {"is_ours": False}
    with as_rank(rank, 2):
        for kind, match, callbacks, options in (
            (RuntimeError, "was not scaled", (), {"is_scaled": False}),
            (TypeError, r"set `Trainer\(use_distributed_sampler=False\)`", (), plain),
            (RuntimeError, r"does not return batches\(loader\)", (), {**plain, "use_distributed_sampler": False}),
            (RuntimeError, "does not step with the balancer", (Accumulates(),), {"num_micro_batches": 3}),
            (RuntimeError, "does not step with the balancer", (), {"num_micro_batches": 3, "limit_train_batches": 2}),
        ):
            module, trainer = parts(dataset, tmp_path, *callbacks, **options)
            with pytest.raises(kind, match=match):
                trainer.fit(module)
            assert_alike(dict(module.model.named_parameters()), whole, most=0.0)
