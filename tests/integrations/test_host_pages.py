"""The programs of docs/programs run as they stand, on two ranks, and train as one process; its table names tests."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.colossalai_models import plugin_of, stand_in_for_a_gpu
from helpers.data_parallel import assert_alike, global_batches
from helpers.dtensor_models import mesh_of
from helpers.hosts import Host
from helpers.megatron_models import megatron_on_cpu
from helpers.transformers_models import as_rank, whole_decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

PAGES = Path(__file__).parents[2] / "docs" / "hosts"


def programs_of(page):
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def names_of(program, behind="", lines=""):
    """What a program of docs/programs defines, with lines of a page behind one of its own."""
    text = (PAGES.parent / "programs" / program).read_text()
    assert text.count(behind) == 1 or not behind
    names = {"__name__": program}
    exec(compile(text.replace(behind, behind + lines, 1), f"docs/programs/{program}", "exec"), names)
    return names


def of_uneven_batches(name):
    """What the program of docs/data_parallel.md defines that has a function of this name."""
    programs = re.findall(r"```python\n(.*?)```", (PAGES.parent / "data_parallel.md").read_text(), re.DOTALL)
    (program,) = [program for program in programs if f"def {name}(" in program]
    names = {"__name__": name}
    exec(compile(program, "docs/data_parallel.md", "exec"), names)
    return names[name]


def losses_of_one_process(num_batches, schedule_every=None):
    """Of the model that two of the pages train, two batches a step, with torch's own clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, schedule_every or num_batches, gamma=0.5)
    losses = []
    for number, x in enumerate(torch.randn(num_batches, 32, 16, generator=torch.Generator().manual_seed(1))):
        loss = (model(x) - x).square().mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return losses


def losses_of_decoder(model, optimizer, seeds, clip=nn.utils.clip_grad_norm_, after=lambda step: None):
    """Of a language model of transformers that one process trains as two of the pages do."""
    losses = []
    for step, seed in enumerate(seeds):
        words = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after(step)
    return losses


def moves_in(monkeypatch, names, moves):
    """Let the balancers that a program makes move units after these steps, by the class that it finds in ``names``."""
    zr = names["zr"]

    class Moving(zr.Balancer):
        def step(self):
            super().step()
            if (shares := moves.get(self._num_steps)) is not None:
                self.move(shares)
                assert self.plan.owned != (1.0, 1.0)

    monkeypatch.setattr(zr, "Balancer", Moving)


def test_torchs_program_trains_as_one_process_and_saves_what_it_learned(run_ranks, tmp_path):
    names = names_of("with_torch.py")
    torch.manual_seed(0)
    whole = names["Model"]()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = []
    for step in range(6):
        words = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(whole(words).flatten(0, 1), words.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    (losses, weights), (other_losses, _) = run_ranks(
        lambda rank, group: names["main"](mesh_of(), tmp_path / "checkpoint"), 2
    )
    assert losses == other_losses == pytest.approx(expected, abs=1e-5)
    state = names["Model"]().state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state[name], weights[name], atol=0, rtol=0)


@pytest.mark.slow
def test_fsdp2(run_ranks, tmp_path):
    names = names_of("with_fsdp2.py")
    torch.manual_seed(0)
    whole = nn.Sequential(names["Block"](), names["Block"]())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    expected = [[], []]
    for step in range(12):
        for seed in (0, 10, 1, 11):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + seed))
            loss = (whole(x) - x.roll(1, dims=1)).square().mean()
            (loss / 4).backward()
            expected[seed % 10].append(loss.item())
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    def check(rank, group):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        losses = names["main"](grid, str(tmp_path))
        assert losses == pytest.approx(expected[rank // 2], abs=1e-5)
        assert names["main"](grid, str(tmp_path), goes_on=True) == pytest.approx(losses[12:], abs=1e-5)

    run_ranks(check, 4)


def cells_under(heading):
    """Of the first table under a heading of the page of hosts, by row and column."""
    _, _, text = (PAGES / "README.md").read_text().partition(f"\n## {heading}\n")
    table = re.search(r"(?m)(^\|.*\n)+", text)[0].splitlines()
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in table]
    (_, *columns), _, *rows = lines
    return {(name, column): cell for name, *cells in rows for column, cell in zip(columns, cells, strict=True)}


def test_each_cell_of_the_table_of_hosts_is_short_and_backed_by_a_test_that_there_is():
    works, shown_by = cells_under("What works"), cells_under("The tests behind it")
    assert works.keys() == shown_by.keys() and len(works) > 70
    assert [cell for cell in works.values() if not re.fullmatch(r"yes|(yes|part|no): .{2,120}", cell)] == []
    tests = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
    assert [key for key, cell in works.items() if not cell.startswith("no") and not tests.search(shown_by[key])] == []
    named = tests.findall((PAGES / "README.md").read_text())
    files = {path.name: path.read_text() for path in (PAGES.parents[1] / "tests").rglob("test_*.py")}
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in files.get(file, "")] == []


@pytest.mark.slow
def test_accelerate(run_ranks, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    names = names_of("with_accelerate.py")
    moves_in(monkeypatch, names, {3: (3, 1), 8: (1, 3)})
    expected = losses_of_one_process(24, schedule_every=4)

    def check(rank, group):
        with as_rank(rank, 2):
            losses = names["main"](str(tmp_path / "saved"))
            assert losses == pytest.approx(expected, abs=1e-5)
            again = names["main"](str(tmp_path / "saved"), goes_on=True)
        assert again == pytest.approx(losses[12:], abs=1e-6)

    run_ranks(check, 2)


@pytest.mark.slow
@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_transformers(run_ranks, tmp_path, monkeypatch):
    import transformers

    names = names_of("with_transformers.py")
    moves_in(monkeypatch, names, {2: (3, 1), 4: (1, 3), 8: (3, 1)})

    def check(rank, group):
        with as_rank(rank, 2):
            losses = names["main"](str(tmp_path))
            return losses, names["main"](str(tmp_path), goes_on=True)

    (losses, again), _ = run_ranks(check, 2)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    expected = losses_of_decoder(model, optimizer, range(12))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert again == pytest.approx(expected[6:], abs=1e-5)
    trained = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0.0, atol=1e-4, msg=name)


@pytest.mark.hosts
@pytest.mark.filterwarnings("ignore")
def test_experts_that_are_loaded_as_the_page_says_train_in_bfloat16_wherever_neurons_are(run_ranks, tmp_path):
    import transformers
    from transformers.distributed import DistributedConfig

    (loading,) = programs_of("transformers.md")
    whole = whole_decoder("mixtral").to(torch.bfloat16)
    whole.config._experts_implementation = "grouped_mm"
    whole.save_pretrained(tmp_path)
    expected = losses_of_decoder(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), [0] * 6)
    assert expected[0] - expected[-1] > 1.0

    def check(rank, group):
        names = {"transformers": transformers, "DistributedConfig": DistributedConfig, "folder": tmp_path}
        names |= {"torch": torch, "dist": dist, "zr": zr}
        with as_rank(rank, 2):
            exec(loading, names)
        model, balancer = names["model"], names["balancer"]
        experts, sizes = model.model.layers[0].mlp.experts, []

        def after(step):
            balancer.step()
            balancer.move(((3, 1), (3, 1), (1, 3), (1, 3), (1, 1), (1, 1))[step])
            sizes.append(local_of(experts.down_proj).shape[2])

        names["optimizer"].param_groups[0]["lr"] = 1e-2
        losses = losses_of_decoder(model, names["optimizer"], [0] * 6, zr.clip_grad_norm_, after)
        assert losses == pytest.approx(expected, abs=2**-4)
        assert sizes == ([48, 48, 16, 16, 32, 32], [16, 16, 48, 48, 32, 32])[rank]
        balancer.close()

    run_ranks(check, 2)


@pytest.mark.slow
@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_peft(run_ranks, tmp_path, monkeypatch):
    import transformers

    peft = pytest.importorskip("peft")
    (wrapping,) = programs_of("peft.md")
    names = names_of("with_transformers.py", "    model = split(folder)\n", textwrap.indent(wrapping, "    "))
    moves_in(monkeypatch, names, {2: (3, 1), 4: (1, 3)})

    class Saving(names["zr"].Balancer):
        def __init__(self, model, optimizer):
            super().__init__(model, optimizer)
            model.save_pretrained(tmp_path / "begun")

    monkeypatch.setattr(zr, "Balancer", Saving)

    def check(rank, group):
        with as_rank(rank, 2):
            return names["main"](str(tmp_path))

    losses, losses_1 = run_ranks(check, 2)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "begun", is_trainable=True).train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    expected = losses_of_decoder(model, optimizer, range(12))
    assert losses == losses_1 == pytest.approx(expected, abs=1e-5)
    model.load_adapter(tmp_path / "trained", "trained")
    for kind in ("default", "trained"):
        state = peft.get_peft_model_state_dict(model, adapter_name=kind)
        assert len(state) == 28
        for name, tensor in peft.get_peft_model_state_dict(model).items():
            torch.testing.assert_close(state[name], tensor, rtol=0.0, atol=1e-4, msg=name)


@pytest.mark.hosts
@pytest.mark.filterwarnings("ignore")
def test_lightning(run_ranks, tmp_path, monkeypatch):
    names = names_of("with_lightning.py")
    moves_in(monkeypatch, names, {3: (3, 1), 6: (1, 3)})
    expected = losses_of_one_process(16)

    def check(rank, group):
        with as_rank(rank, 2):
            assert names["main"](str(tmp_path)) == pytest.approx(expected, abs=1e-5)

    run_ranks(check, 2)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=4.ckpt", "step=8.ckpt"]


@pytest.mark.hosts
@pytest.mark.filterwarnings("ignore")
def test_trainer(run_ranks, tmp_path, monkeypatch):
    import transformers
    from accelerate.parallelism_config import ParallelismConfig

    names = names_of("with_trainer.py")
    monkeypatch.setattr(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None)

    def check(rank, group):
        with as_rank(rank, 2):
            return names["main"](str(tmp_path))

    losses, losses_1 = run_ranks(check, 2)
    assert losses == losses_1 and len(losses) == 8 and losses[-1] < losses[0]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.vocab_size == 64
    assert (tmp_path / "run" / "checkpoint-4" / "zeroresize").is_dir()


@pytest.mark.hosts
@pytest.mark.filterwarnings("ignore")
def test_megatron(run_ranks, tmp_path, monkeypatch):
    pytest.importorskip("megatron.core.tensor_parallel.layers")
    from megatron.core import dist_checkpointing, parallel_state

    names = names_of("with_megatron.py")
    moves_in(monkeypatch, names, {2: (3, 1), 4: (1, 3), 6: (3, 1)})

    def check(rank, group):
        with megatron_on_cpu(2):
            replica, losses = parallel_state.get_data_parallel_rank(), names["main"](str(tmp_path))
        with megatron_on_cpu(1), monkeypatch.context() as alone:
            wrapped, _ = names["build"]()  # whose gradients are those of all words
            model, expected = wrapped.module, []
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for number in range(16):
                for of_replica in range(2):
                    alone.setattr(parallel_state, "get_data_parallel_rank", lambda of_replica=of_replica: of_replica)
                    alone.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
                    words, positions, mask, labels = names["batch"](number)
                    with wrapped.no_sync():
                        loss = model(words, positions, mask, labels=labels).mean()
                        loss.backward()
                    expected += [loss.item()] if of_replica == replica else []
                if number % 2:
                    for weight in model.parameters():
                        weight.grad = weight.main_grad / 2
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    wrapped.zero_grad_buffer()
            assert losses == pytest.approx(expected, abs=1e-5)
            learned = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            torch.manual_seed(1)
            for weight in model.parameters():
                weight.data.normal_()
            state = {"model": model.sharded_state_dict(metadata={"dp_cp_group": wrapped.dp_cp_group})}
            model.load_state_dict(dist_checkpointing.load(state, str(tmp_path))["model"])
            for name, weight in model.named_parameters():
                torch.testing.assert_close(weight, learned[name], rtol=0.0, atol=1e-5, msg=name)

    run_ranks(check, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (1, "bf16"), (0, "fp32")])
@pytest.mark.filterwarnings("ignore")
def test_colossalai(run_ranks, tmp_path, monkeypatch, colossalai_module, stage, precision):
    """In float32, which the host refuses by an assertion alone, as one process; in bfloat16 it goes on bit for bit."""
    names = names_of("with_colossalai.py")
    changes = {"zero_stage": stage, "precision": precision}
    monkeypatch.setitem(names, "HybridParallelPlugin", lambda **given: plugin_of(**given | changes))
    if precision == "fp32":
        moves_in(monkeypatch, names, {2: (3, 1), 5: (1, 3)})
    whole, expected = names["undivided"](), [[], []]
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    for number in range(32):
        loss = whole(**names["batch"](number)).loss
        (loss / 4).backward()
        expected[number % 2].append(loss.item())
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def check(rank, group):
        Host(group)
        stand_in_for_a_gpu()
        losses = names["main"](str(tmp_path))
        again = names["main"](str(tmp_path), goes_on=True)
        if precision == "bf16":
            assert again == losses[8:]
        else:
            assert losses == pytest.approx(expected[rank // 2], abs=1e-5)
            assert again == pytest.approx(losses[8:], abs=1e-5)

    run_ranks(check, 4)


@pytest.mark.filterwarnings("ignore")
def test_deepspeed(run_ranks, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from helpers.deepspeed_models import as_deepspeed_rank

    names = names_of("with_deepspeed.py")
    moves_in(monkeypatch, names, {2: (3, 1), 6: (1, 3)})
    torch.manual_seed(0)
    config = names["transformers"].LlamaConfig(**names["SIZES"], num_hidden_layers=2, vocab_size=64)
    whole = names["transformers"].LlamaForCausalLM(config)
    optimizer, expected = torch.optim.AdamW(whole.parameters(), lr=1e-3), []
    for step in range(8):
        for number in range(2):
            words = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(2 * step + number))
            loss = whole(input_ids=words, labels=words).loss
            (loss / 2).backward()
            expected.append(loss.item())
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def check(rank, group):
        as_deepspeed_rank(rank)
        losses = names["main"](str(tmp_path / "saved"))
        assert losses == pytest.approx(expected, abs=1e-5)
        assert names["main"](str(tmp_path / "saved"), goes_on=True) == pytest.approx(losses[8:], abs=1e-5)

    run_ranks(check, 2)


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).double()


def rows_of_classes(number=72):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(number, 6, generator=generator).double(), torch.randint(3, (number,), generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def assert_trained_as_by_one_process(model, seed=0, **options):
    """In two epochs of global batches of 32 samples, with AdamW."""
    whole, rows = classifier(), rows_of_classes()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, **options)
    for batch in global_batches(len(rows), 32, seed=seed, epochs=2):
        nn.functional.cross_entropy(whole(rows.tensors[0][batch]), rows.tensors[1][batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_alike(dict(model.named_parameters()), dict(whole.named_parameters()), most=1e-9)


def test_uneven_batches_with_accelerate(run_ranks):
    pytest.importorskip("accelerate")
    train = of_uneven_batches("train_with_accelerate")

    def check(rank, group):
        with as_rank(rank, 2):
            assert_trained_as_by_one_process(train(classifier(), rows_of_classes(), 2, cpu=True))

    run_ranks(check, 2)


@pytest.mark.hosts
@pytest.mark.filterwarnings("ignore")
def test_uneven_batches_with_lightning(run_ranks, tmp_path):
    train = of_uneven_batches("train_with_lightning")

    def check(rank, group):
        options = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False, "default_root_dir": tmp_path}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        with as_rank(rank, 2):
            assert_trained_as_by_one_process(train(classifier(), rows_of_classes(), **options, **quiet))

    run_ranks(check, 2)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_uneven_batches_with_a_trainer(run_ranks, tmp_path):
    train = of_uneven_batches("train_with_trainer")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = classifier()

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}

    rows = [{"x": x, "labels": label} for x, label in rows_of_classes()]
    settings = {"num_train_epochs": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    quiet = {"save_strategy": "no", "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0}

    def check(rank, group):
        with as_rank(rank, 2):
            model = train(Model(), rows, str(tmp_path), **settings, **quiet, seed=5)
        assert_trained_as_by_one_process(model.layers, seed=5, weight_decay=0.0)

    run_ranks(check, 2)
