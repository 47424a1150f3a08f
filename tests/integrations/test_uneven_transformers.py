"""UnevenTrainer: losses and weights are those of one process, also from a checkpoint; what it undoes and refuses."""

import time

import pytest
import torch
from helpers.data_parallel import assert_alike, global_batches
from helpers.on_ranks import on_ranks
from helpers.transformers_models import IS_5, WORDS, as_rank, whole_decoder
from helpers.uneven_trainers import (
    CLIP,
    GLOBAL_BATCH,
    SEED,
    NamedRows,
    TakesMeans,
    TakesSums,
    trained_by_one_process,
)

transformers = pytest.importorskip("transformers")
UnevenTrainer = pytest.importorskip("zeroresize.integrations.transformers").UnevenTrainer
pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]
UNEVEN, NONE = (8, 4), (12, 0)


def trainer_of(
    model, folder, kind=None, *, num_micro_batches=1, counts=None, dataset=None, eval_dataset=None, **options
):
    settings = {
        "per_device_train_batch_size": GLOBAL_BATCH // 2 // num_micro_batches,
        "gradient_accumulation_steps": num_micro_batches,
        "num_train_epochs": 2,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": SEED,
        "remove_unused_columns": False,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **(settings | options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return (kind or UnevenTrainer)(
        model,
        arguments,
        train_dataset=dataset or NamedRows(43, masked=True),
        eval_dataset=eval_dataset,
        optimizers=(optimizer, schedule),
        **({} if counts is None else {"balancing": {"counts": counts}}),
    )


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def near(values):
    return pytest.approx(values, abs=1e-4)  # as the Trainer rounds losses


CASES = [
    (kind, number, num_micro_batches, counts)
    for kind in (TakesSums, TakesMeans)
    for number, num_micro_batches, counts in ((43, 1, UNEVEN), (43, 3, NONE), (43, 3, None), (37, 3, UNEVEN))
    if IS_5 or number == 43  # version 4 ends before the last step of an epoch that is not full
]


@on_ranks(2, CASES, timeout_s=110)
def test_losses_and_weights_are_those_of_one_process(rank, group, kind, number, num_micro_batches, counts, *, tmp_path):
    dataset = NamedRows(number, masked=True)
    expected, whole = trained_by_one_process(dataset, 2)
    assert len(expected) == 8
    with as_rank(rank, 2):
        trainer = trainer_of(kind(), tmp_path, num_micro_batches=num_micro_batches, counts=counts, dataset=dataset)
        trainer.train()
    assert losses_of(trainer) == near(expected)
    assert_alike(dict(trainer.model.named_parameters()), whole)


@on_ranks(2, [(TakesSums,), (TakesMeans,)], timeout_s=110)
def test_a_rank_whose_samples_are_all_masked_adds_nothing(rank, group, kind, *, tmp_path):
    dataset = NamedRows(36)
    dataset.targets[::2] = -100
    expected, whole = trained_by_one_process(dataset, 2)
    with as_rank(rank, 2):
        trainer = trainer_of(kind(), tmp_path, counts=(11, 1), dataset=dataset, logging_nan_inf_filter=False)
        trainer.train()
    assert losses_of(trainer) == near(expected)
    assert_alike(dict(trainer.model.named_parameters()), whole)


@on_ranks(2, timeout_s=110)
def test_with_split_batches_a_global_batch_is_as_large_as_accelerate_makes_it(rank, group, *, tmp_path):
    expected, whole = trained_by_one_process(NamedRows(43, masked=True), 2)
    options = {"per_device_train_batch_size": GLOBAL_BATCH, "accelerator_config": {"split_batches": True}}
    with as_rank(rank, 2):
        trainer = trainer_of(TakesSums(), tmp_path, counts=UNEVEN, **options)
        trainer.train()
    assert losses_of(trainer) == near(expected)
    assert_alike(dict(trainer.model.named_parameters()), whole)


def test_one_process_alone_trains_as_ever(tmp_path):
    expected, whole = trained_by_one_process(NamedRows(43, masked=True), 2)
    trainer = trainer_of(TakesSums(), tmp_path, per_device_train_batch_size=GLOBAL_BATCH)
    trainer.train()
    assert losses_of(trainer) == near(expected)
    assert_alike(dict(trainer.model.named_parameters()), whole)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@on_ranks(2, timeout_s=110)
def test_a_training_goes_on_from_a_checkpoint_behind_what_it_saw(rank, group, *, tmp_path, num_micro_batches):
    options = {"num_micro_batches": num_micro_batches, "counts": UNEVEN, "save_strategy": "steps"}
    expected, whole = trained_by_one_process(NamedRows(43, masked=True), 2)
    with as_rank(rank, 2):
        trainer_of(TakesSums(), tmp_path, save_steps=2, **options).train()
        for step in (2, 4, 6):  # within an epoch, and between two
            trainer = trainer_of(TakesSums(), tmp_path / "again", **options, save_steps=100)
            trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
            assert losses_of(trainer)[-(8 - step) :] == near(expected[step:]), step
            assert_alike(dict(trainer.model.named_parameters()), whole)


@on_ranks(2, timeout_s=110)
def test_a_checkpoint_of_another_trainer_is_refused(rank, group, *, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    with as_rank(rank, 2):
        trainer_of(TakesSums(), tmp_path, transformers.Trainer, **options).train()
        with pytest.raises(ValueError, match="the checkpoint was saved without UnevenTrainer"):
            trainer_of(TakesSums(), tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        trainer = trainer_of(TakesSums(), tmp_path, ignore_data_skip=True)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 8


@pytest.mark.skipif(not IS_5, reason="the Trainer of version 4 counts labels that are no targets")
@on_ranks(2, timeout_s=110)
def test_a_decoder_that_shifts_labels_trains_as_in_one_process(rank, group, *, tmp_path):
    words = torch.randint(WORDS, (43, 8), generator=torch.Generator().manual_seed(3))
    labels = words.masked_fill(torch.rand(43, 8, generator=torch.Generator().manual_seed(4)) < 0.4, -100)
    rows = [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]
    whole = whole_decoder("llama")
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for batch in global_batches(43, GLOBAL_BATCH, seed=SEED, epochs=2):
        whole(input_ids=words[batch], labels=labels[batch]).loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    for counts in (UNEVEN, NONE):
        with as_rank(rank, 2):
            trainer = trainer_of(whole_decoder("llama"), tmp_path, num_micro_batches=2, counts=counts, dataset=rows)
            trainer.train()
        assert_alike(dict(trainer.model.named_parameters()), dict(whole.named_parameters()), most=1e-6)


@on_ranks(2, timeout_s=110)
def test_a_loss_of_ones_own_is_scaled_and_what_is_not_scaled_is_an_error(rank, group, *, tmp_path):
    class OwnLoss(UnevenTrainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs)["loss"]

    class OwnStep(UnevenTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = model(**inputs)["loss"]
            loss.backward()
            return loss.detach()

    _, whole = trained_by_one_process(NamedRows(43, masked=True), 2)
    with as_rank(rank, 2):
        trainer = trainer_of(TakesSums(), tmp_path, OwnLoss, num_micro_batches=3, counts=UNEVEN)
        trainer.train()
        assert_alike(dict(trainer.model.named_parameters()), whole)
        model = TakesSums()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(RuntimeError, match=r"went to no accelerator.backward, and so was not scaled"):
            trainer_of(model, tmp_path, OwnStep, counts=UNEVEN).train()
    assert all(map(torch.equal, before, model.parameters()))


@on_ranks(2, timeout_s=110)
def test_samplers_and_data_without_length_are_refused_by_name(rank, group, *, tmp_path):
    class Weighted(UnevenTrainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.WeightedRandomSampler([1.0] * 43, 43)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(NamedRows(43))

    with as_rank(rank, 2):
        with pytest.raises(ValueError, match="sampled by WeightedRandomSampler is not allowed"):
            trainer_of(TakesSums(), tmp_path, Weighted).train()
        with pytest.raises(ValueError, match=r"with Stream sampled by .* is not allowed"):
            trainer_of(TakesSums(), tmp_path, dataset=Stream(), max_steps=2).train()


@pytest.mark.slow
@on_ranks(2, timeout_s=110)
def test_a_slow_rank_is_given_fewer_samples_while_workers_fetch_and_the_model_is_evaluated(rank, group, *, tmp_path):
    class Slow(TakesSums):
        def forward(self, words, labels=None, **kwargs):
            if self.training:
                time.sleep(0.001 * len(words) * (1.0 + 2.0 * rank))
            return super().forward(words, labels, **kwargs)

    dataset = NamedRows(360, masked=True)
    _, whole = trained_by_one_process(dataset, 2)
    options = {"eval_strategy": "steps", "eval_steps": 30, "dataloader_num_workers": 1}
    with as_rank(rank, 2):
        trainer = trainer_of(Slow(), tmp_path, dataset=dataset, eval_dataset=NamedRows(10), **options)
        trainer.train()
        assert_alike(dict(trainer.model.named_parameters()), whole)
        assert trainer.balancer.counts[0] > 6
        trainer.train()  # anew, with a balancer of its own
    assert trainer.state.global_step == 60
