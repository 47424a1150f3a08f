"""BalanceCallback in Lightning: losses, checkpoints of both forms, going on in the middle, and what is refused."""

import importlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.dtensor_models import batch, whole_model
from helpers.lightning_models import batches, fit, fit_whole, module_class, moves_at, trainer_of
from helpers.transformers_models import as_rank
from torch.nn import functional

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]
LIBRARIES = ["lightning.pytorch", "pytorch_lightning"]
FORMS = {"distributed": True, "consolidated": False}
MOVES = {1: (3, 1), 4: (1, 3)}


def balance_callback():
    from zeroresize.integrations.lightning import BalanceCallback

    return BalanceCallback(zr.BalanceConfig(mode="exact"))


def checkpoints_in(library, folder, **when):
    kind = importlib.import_module(f"{library}.callbacks").ModelCheckpoint
    return kind(dirpath=folder, save_top_k=-1, filename="{step}", **when)


def loaded_whole(path, is_distributed):
    """The whole model with what a checkpoint holds, read without Lightning."""
    model = whole_model()
    if is_distributed:
        state = {f"state_dict.model.{name}": tensor for name, tensor in model.state_dict().items()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
    else:
        state = torch.load(path, weights_only=True)["state_dict"]
        model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_losses_are_those_of_one_process_also_from_a_checkpoint_in_the_middle_of_an_episode(
    run_ranks, tmp_path, library, form
):
    importlib.import_module(library)
    whole = fit_whole(library, tmp_path)
    is_distributed = FORMS[form]

    def check(rank, group):
        callback = balance_callback()
        callbacks = [checkpoints_in(library, tmp_path, every_n_train_steps=3), moves_at(library, callback, MOVES)]
        module, trainer = fit(library, rank, tmp_path, [callback, *callbacks], distributed=is_distributed)
        assert module.losses == pytest.approx(whole.losses, abs=1e-10)
        assert callback.balancer.plan.owned == (0.5, 1.5)
        assert local_of(module.model.blocks[0].mlp.down.weight).shape == (16, 24)  # at home
        assert "save_checkpoint" not in vars(trainer)

        resumed, seen = balance_callback(), []
        resumed_module = module_class(library)
        resumed.on_train_batch_start = lambda *_: seen.append(
            tuple(local_of(resumed_module.model.blocks[0].mlp.down.weight).shape)
        )
        fit(
            library,
            rank,
            tmp_path,
            [resumed, moves_at(library, resumed, MOVES)],
            distributed=is_distributed,
            ckpt_path=tmp_path / "step=3.ckpt",
            module=resumed_module,
        )
        assert resumed_module.losses == pytest.approx(whole.losses[6:], abs=1e-10)
        assert seen == [(16, 36), (16, 36), *[(16, 12)] * 4] if rank == 0 else seen[0] == (16, 12)
        for name, parameter in resumed_module.model.named_parameters():
            assert torch.allclose(parameter.full_tensor(), dict(whole.model.named_parameters())[name], atol=1e-9), name
        with torch.no_grad():
            return functional.cross_entropy(module.model(batch(7)).flatten(0, 1), batch(8).flatten()).item()

    loss, _ = run_ranks(check, 2)
    model = loaded_whole(tmp_path / "step=6.ckpt", is_distributed)
    with torch.no_grad():
        there = functional.cross_entropy(model(batch(7)).flatten(0, 1), batch(8).flatten()).item()
    assert there == pytest.approx(loss, abs=1e-12)


def test_after_a_training_that_broke_off_it_is_saved_at_home_and_the_next_one_goes_on(run_ranks, tmp_path):
    library = LIBRARIES[0]
    lightning = importlib.import_module(library)

    class Fails(lightning.Callback):
        is_on = True

        def on_train_batch_end(self, trainer, module, outputs, data, number):
            if number == 5 and self.is_on:
                raise ArithmeticError("five")

    def broken_and_gone_on(rank, folder, *callbacks):
        fails, module = Fails(), module_class(library)
        strategy = importlib.import_module(f"{library}.strategies").ModelParallelStrategy(1, 2)
        trainer = trainer_of(lightning, folder, [*callbacks, fails], strategy=strategy, devices=2)
        with pytest.raises(ArithmeticError):
            trainer.fit(module, batches())
        weight = module.model.blocks[0].mlp.down.weight
        shapes = [tuple(local_of(weight).shape)]
        trainer.save_checkpoint(folder / "broken.ckpt")
        shapes.append(tuple(local_of(weight).shape))
        fails.is_on = False
        trainer.fit(module, batches(), ckpt_path=folder / "broken.ckpt")
        shapes.append(tuple(local_of(weight).shape))
        assert "save_checkpoint" not in vars(trainer)
        return module.losses, shapes

    def check(rank, group):
        with as_rank(rank, 2):
            expected, _ = broken_and_gone_on(rank, tmp_path / "host")
            callback = balance_callback()
            callbacks = callback, moves_at(library, callback, MOVES)
            losses, shapes = broken_and_gone_on(rank, tmp_path / "ours", *callbacks)
        assert losses == pytest.approx(expected, abs=1e-10)
        assert callback.balancer.plan.owned == (0.5, 1.5)
        away = ((16, 36), (16, 12))[rank]
        assert shapes == [away, away, (16, 24)]

    run_ranks(check, 2)


def test_other_strategies_and_several_optimizers_are_refused(run_ranks, tmp_path):
    library = LIBRARIES[0]
    lightning = importlib.import_module(library)

    def check(rank, group):
        module = module_class(library)
        module.is_split = True
        with as_rank(rank, 2):
            trainer = trainer_of(lightning, tmp_path, [balance_callback()], strategy="ddp", devices=2)
            with pytest.raises(ValueError, match="DDPStrategy is not allowed: wanted is ModelParallelStrategy"):
                trainer.fit(module, batches())

        several = module_class(library)
        several.automatic_optimization = False
        both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (several.model.embed, several.model.blocks)]
        several.configure_optimizers = lambda: both
        with pytest.raises(ValueError, match="with 2 optimizers is not allowed"):
            fit(
                library,
                rank,
                tmp_path,
                [balance_callback()],
                module=several,
                gradient_clip_val=None,
                accumulate_grad_batches=1,
            )

    run_ranks(check, 2)
