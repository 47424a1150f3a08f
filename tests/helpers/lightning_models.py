"""A small decoder that Lightning trains: split in configure_model, or whole in one process."""

import importlib

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import zeroresize as zr
from helpers.dtensor_models import ATTENTION, batch, split, whole_model
from helpers.transformers_models import as_rank


def module_class(library):
    """A LightningModule of ``lightning.pytorch`` or ``pytorch_lightning``, which keeps losses and where units are."""
    lightning = importlib.import_module(library)

    class Decoder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = whole_model()
            self.losses, self.is_split = [], False

        def configure_model(self):
            if not self.is_split:
                split(self.model, self.device_mesh["tensor_parallel"])
                zr.convert(self.model, segments=ATTENTION)
                self.is_split = True

        def training_step(self, seed, number):
            words, targets = batch(number), batch(number + 100)  # the loader begins anew when training goes on
            loss = functional.cross_entropy(self.model(words).flatten(0, 1), targets.flatten())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Decoder()


def moves_at(library, callback, moves):
    """Another callback: it moves units of ``callback`` after these numbers of optimizer steps."""
    lightning = importlib.import_module(library)

    class Moves(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step in moves and (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                callback.balancer.move(moves[trainer.global_step])

    return Moves()


def batches(num=12):
    return DataLoader(range(num), batch_size=None)


def fit(library, rank, folder, callbacks, *, distributed=True, ckpt_path=None, module=None, **options):
    """Fit a split decoder for some steps on this rank; its module and its Trainer."""
    lightning = importlib.import_module(library)
    strategies = importlib.import_module(f"{library}.strategies")
    with as_rank(rank, 2):
        strategy = strategies.ModelParallelStrategy(1, 2, save_distributed_checkpoint=distributed)
        trainer = trainer_of(lightning, folder, callbacks, strategy=strategy, devices=2, **options)
        module = module or module_class(library)
        trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return module, trainer


def fit_whole(library, folder, **options):
    """The same of the whole decoder in this process."""
    lightning = importlib.import_module(library)
    module = module_class(library)
    module.is_split = True
    trainer_of(lightning, folder, [], devices=1, **options).fit(module, batches())
    return module


def trainer_of(lightning, folder, callbacks, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "barebones": False}
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1, **options}
    return lightning.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        use_distributed_sampler=False,
        **quiet,
        **options,
    )
