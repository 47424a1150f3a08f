"""UnevenBatches in loops with Accelerate: losses and weights are those of one process; what is undone and refused."""

import pytest
import torch
from helpers.data_parallel import assert_alike, counted_in
from helpers.on_ranks import on_ranks
from helpers.transformers_models import as_rank
from helpers.uneven_trainers import CLIP, GLOBAL_BATCH, SEED, NamedRows, Rows, TakesMeans, trained_by_one_process
from torch.utils.data import DataLoader

import zeroresize as zr

accelerate = pytest.importorskip("accelerate")
UnevenBatches = pytest.importorskip("zeroresize.integrations.accelerate").UnevenBatches
pytestmark = pytest.mark.filterwarnings("ignore")


def counted(rows):
    return counted_in(rows)


def parts(dataset, *, counts=None, num_micro_batches=1):
    """All that a loop needs; the loader is prepared, too, which changes nothing."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=num_micro_batches)
    model = TakesMeans()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    balancer = zr.DataBalancer(
        model, optimizer, global_batch=GLOBAL_BATCH, counts=counts, num_micro_batches=num_micro_batches
    )
    loader = DataLoader(dataset, batch_sampler=balancer.sampler(dataset, seed=SEED))
    batches = UnevenBatches(accelerator, balancer, loader, counted)
    assert accelerator.prepare(batches) is batches
    return accelerator, model, optimizer, balancer, batches


def trained(parts, save_at=None, folder=None):
    """The losses of steps of an epoch."""
    accelerator, model, optimizer, balancer, batches = parts
    losses, loss = [], 0.0
    for words, targets in batches:
        with accelerator.accumulate(model):
            loss += batches.backward(model(words, targets)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            balancer.step()
            losses.append(accelerator.reduce(loss, "mean").item())
            loss = 0.0
            if len(losses) == save_at:
                accelerator.save_state(str(folder))
    return losses


@pytest.mark.slow
@on_ranks(2, [(43, 1, (8, 4)), (43, 3, (12, 0)), (43, 3, None), (37, 3, (8, 4))])
def test_losses_and_weights_are_those_of_one_process_also_from_a_saved_state(
    rank, group, number, num_micro_batches, counts, *, tmp_path
):
    dataset, folder = Rows(number, masked=True), tmp_path / f"{number}{num_micro_batches}"
    expected, whole = trained_by_one_process(dataset, 2)
    options = {"counts": counts, "num_micro_batches": num_micro_batches}
    with as_rank(rank, 2):
        of_loop = parts(dataset, **options)
        assert trained(of_loop, 2, folder) + trained(of_loop) == pytest.approx(expected, rel=1e-12)
        assert_alike(dict(of_loop[1].module.named_parameters()), whole)
        of_loop = parts(dataset, **options)
        of_loop[0].load_state(str(folder))
        assert trained(of_loop) + trained(of_loop) == pytest.approx(expected[2:], rel=1e-12)
        assert_alike(dict(of_loop[1].module.named_parameters()), whole)


@on_ranks(2)
def test_what_would_be_scaled_twice_or_not_at_all_is_an_error(rank, group):
    dataset = Rows(43, masked=True)
    with as_rank(rank, 2):
        _, model, optimizer, _, batches = parts(dataset, num_micro_batches=2)
        words, targets = next(iter(batches))
        for scale in (batches.backward, batches.scaled):
            with pytest.raises(RuntimeError, match=r"within accelerator.accumulate\(model\)"):
                scale(model(words, targets)["loss"])

        accelerator, model, optimizer, _, batches = parts(dataset)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for words, targets in batches:
            accelerator.backward(model(words, targets)["loss"])
            with pytest.raises(RuntimeError, match=r"without loss_scale"):
                optimizer.step()
            batches.backward(model(words, targets)["loss"])
            with pytest.raises(RuntimeError, match="scaled once"):
                batches.backward(model(words, targets)["loss"])
            break
        assert all(map(torch.equal, before, model.parameters()))

        accelerator, model, optimizer, _, batches = parts(dataset, num_micro_batches=2)
        with pytest.raises(RuntimeError, match="was not scaled"):
            for words, targets in batches:
                accelerator.backward(model(words, targets)["loss"])


@on_ranks(2)
def test_a_prepared_loader_is_noticed(rank, group):
    dataset = NamedRows(200)
    with as_rank(rank, 2):
        accelerator, model, optimizer, balancer, batches = parts(dataset)
        with pytest.raises(ValueError, match="does not have the `batch_size` attribute set"):
            accelerate.data_loader.prepare_data_loader(batches._loader, split_batches=True)
        prepared = accelerator.prepare(batches._loader)
        with pytest.raises(RuntimeError, match=r"no batch of this step|something divides the sampler's batches"):
            for rows in prepared:
                accelerator.backward(model(**rows)["loss"] * balancer.loss_scale())
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
