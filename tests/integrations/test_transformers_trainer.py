"""BalanceCallback in the Trainer of transformers 5: losses, saving and going on in the middle, whole models."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.lora import with_lora
from helpers.transformers_models import WORDS, as_rank, batch, split_by_plan, whole_decoder

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]
MOVES = {2: (3, 1), 5: (1, 3)}
STEPS, SAVED_AT = 8, 4


def words(number=64):
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(WORDS, (8,), generator=generator) for _ in range(number)]
    return [{"input_ids": each, "labels": each} for each in drawn]


def trainer_of(model, folder, callbacks, **options):
    """A Trainer that accumulates two batches a step, clips, and saves once in the middle."""
    import transformers
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None  # which refuses CPUs
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVED_AT,
        "save_only_model": True,  # its way of saving an optimizer is not for tensor parallelism
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **(settings | options))
    return transformers.Trainer(model, arguments, train_dataset=words(), callbacks=callbacks)


def keeper(values, widths=None, weight=None):
    """A callback that keeps the loss and norm of each step, and how many neurons this rank has when it begins."""
    import transformers

    class Keeps(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if widths is not None:
                widths.append(len(local_of(weight)))

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                values.append((state.global_step, float(logs["loss"]), float(logs["grad_norm"])))

    return Keeps()


def mover(callback):
    import transformers

    class Moves(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in MOVES:
                callback.balancer.move(MOVES[state.global_step])

    return Moves()


def balanced(rank, whole, folder, resume_from=None, **options):
    """Train with BalanceCallback; (losses and norms, numbers of neurons, the model, the Trainer)."""
    from zeroresize.integrations.transformers import BalanceCallback

    model, values, widths = split_by_plan(whole, rank), [], []
    callback = BalanceCallback(zr.BalanceConfig(mode="exact"))
    keeps = keeper(values, widths, model.model.layers[0].mlp.up_proj.weight)
    trainer = trainer_of(model, folder, [keeps, mover(callback), callback], **options)
    trainer.train(resume_from_checkpoint=resume_from)
    return values, widths, model, trainer


def near(values):
    return [pytest.approx(each, rel=1e-6) for each in values]  # norms of LLaMA compute in float32


def test_it_trains_as_without_us_and_goes_on_from_the_middle_of_an_episode(run_ranks, tmp_path):
    import transformers

    whole = whole_decoder("llama")
    whole.save_pretrained(tmp_path / "whole")

    def check(rank, group):
        with as_rank(rank, 2):
            expected = []
            host = split_by_plan(tmp_path / "whole", rank)
            trainer_of(host, tmp_path / "host", [keeper(expected)], save_strategy="no").train()
            assert [step for step, *_ in expected] == list(range(1, STEPS + 1))

            values, widths, model, trainer = balanced(rank, tmp_path / "whole", tmp_path / "ours")
            assert values == near(expected)
            many, few = ((48, 16), (16, 48))[rank]
            assert widths == [32, 32, many, many, many, few, few, few]
            trainer.save_model(str(tmp_path / "trained"))

            saved = tmp_path / "ours" / f"checkpoint-{SAVED_AT}"
            values, widths, _, _ = balanced(rank, tmp_path / "whole", tmp_path / "ours", str(saved))
            assert values == near(expected[SAVED_AT:])
            assert widths == [many, few, few, few]
            with torch.no_grad():
                return model(**batch(7)).loss.item()

    loss, _ = run_ranks(check, 2, timeout_s=110)
    for folder in ("trained", f"ours/checkpoint-{STEPS}"):
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).double()
        with torch.no_grad():
            assert reloaded(**batch(7)).loss.item() == pytest.approx(loss, abs=1e-9), folder


def test_adapters_move_train_as_undivided_ones_and_are_saved_whole(run_ranks, tmp_path):
    from zeroresize.integrations.transformers import BalanceCallback

    peft = pytest.importorskip("peft")
    whole, expected = whole_decoder("llama"), []
    whole.save_pretrained(tmp_path / "whole")
    names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    with torch.no_grad():
        whole = with_lora(whole, names)
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "begun", no_dist=True)
    trainer_of(whole, tmp_path / "undivided", [keeper(expected)], save_strategy="no").train()

    def check(rank, group):
        with as_rank(rank, 2):
            model, values, widths = zr.convert(with_lora(split_by_plan(tmp_path / "whole", rank), names)), [], []
            dcp.load(zr.sharded_state_dict(model), storage_reader=zr.CheckpointReader(tmp_path / "begun"))
            callback = BalanceCallback(zr.BalanceConfig(mode="exact"))
            up = model.base_model.model.model.layers[0].mlp.up_proj.lora_B.default.weight
            trainer = trainer_of(model, tmp_path / "ours", [keeper(values, widths, up), mover(callback), callback])
            trainer.train()
            assert values == near(expected)
            many, few = ((48, 16), (16, 48))[rank]
            assert widths == [32, 32, many, many, many, few, few, few]
            trainer.save_model(str(tmp_path / "trained"))
            with torch.no_grad():
                return model(**batch(7)).loss.item()

    loss, _ = run_ranks(check, 2, timeout_s=110)
    for folder in ("trained", f"ours/checkpoint-{STEPS}"):
        loaded = peft.PeftModel.from_pretrained(whole_decoder("llama"), tmp_path / folder)
        with torch.no_grad():
            assert loaded(**batch(7)).loss.item() == pytest.approx(loss, abs=1e-9), folder
    assert (tmp_path / "ours" / f"checkpoint-{SAVED_AT}" / "adapter_model.safetensors").exists()
