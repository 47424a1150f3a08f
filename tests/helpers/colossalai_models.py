"""Small LLaMAs that Colossal-AI's HybridParallelPlugin divides and trains on CPUs, beside the undivided ones."""

import contextlib
from types import SimpleNamespace

import torch

from helpers.hosts import Host

VOCABULARY = 128  #: a multiple of what Colossal-AI pads to on each of two ranks
OPTIONS = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}
MAX_NORM = 0.5


def llama(**changes):
    """An undivided model, alike on all ranks."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "use_cache": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).train()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


class _Stream:
    def wait_stream(self, other):
        pass


def stand_in_for_a_gpu():
    """Of which low-level ZeRO and Gemini ask for streams."""
    from colossalai.accelerator import get_accelerator
    from colossalai.zero.low_level import LowLevelZeroOptimizer

    accelerator = get_accelerator()
    accelerator.Stream = accelerator.current_stream = lambda *_: _Stream()
    accelerator.stream = contextlib.nullcontext
    accelerator.synchronize = lambda: None
    accelerator.device_count = lambda: 1
    torch.Tensor.record_stream = lambda *_: None
    torch.cuda.set_device = lambda _: None  # GPT-2 names one on its way
    LowLevelZeroOptimizer._sanity_checks = lambda _: None


def plugin_of(*, zero_stage, precision, **options):
    """A HybridParallelPlugin, also of float32 beside ZeRO, which it refuses by an assertion alone."""
    from colossalai.booster.plugin import HybridParallelPlugin

    is_refused = zero_stage > 0 and precision == "fp32"
    plugin = HybridParallelPlugin(zero_stage=zero_stage, precision="bf16" if is_refused else precision, **options)
    if is_refused:
        plugin.precision = "float32"
        plugin.zero_config["forced_dtype"] = torch.float32
    return plugin


def boosted(group, model, *, stage=0, precision="fp32", sequence=None, make_optimizer=adamw, tp_size=2, **options):
    """A model that Booster has divided over pairs of ranks, with what trains it."""
    from colossalai.booster import Booster

    Host(group)
    stand_in_for_a_gpu()
    if sequence is not None:
        options |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": sequence}
    options = {"overlap_communication": False, "max_norm": MAX_NORM, **options}
    plugin = plugin_of(zero_stage=stage, precision=precision, tp_size=tp_size, pp_size=1, **options)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return SimpleNamespace(model=model, optimizer=optimizer, booster=booster, plugin=plugin, stage=stage)


def words(number):
    """A micro-batch; with a padded row LLaMA's own attention under sequence parallelism sees no later tokens."""
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, -1], labels[0, -1] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def backward(run, number, micro_batches=2):
    """Gradients of a micro-batch of this replica; returns its loss."""
    replicas = run.plugin.dp_group
    is_last = number % micro_batches == micro_batches - 1 or run.stage == 2
    with contextlib.nullcontext() if is_last else run.booster.no_sync(run.model, run.optimizer):
        loss = run.model(**words(number * replicas.size() + replicas.rank())).loss
        run.booster.backward(loss / micro_batches, run.optimizer)
    return loss.item()


def end_update(run):
    run.optimizer.step()
    run.optimizer.zero_grad()


def update(run, step, micro_batches=2):
    """One update by micro-batches of this replica; returns their losses."""
    losses = [backward(run, step * micro_batches + number, micro_batches) for number in range(micro_batches)]
    end_update(run)
    return losses


def undivided_run(model, steps, num_replicas=1, micro_batches=2):
    """Losses, by step, and weights of the undivided model in the same training."""
    optimizer, losses = adamw(model), []
    for step in range(steps):
        for number in range(micro_batches * num_replicas):
            loss = model(**words(step * micro_batches * num_replicas + number)).loss
            (loss / micro_batches / num_replicas).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def part_at_home(whole, held, rank):
    """What a rank of two holds at home of an undivided model's weight."""
    dim = next((dim for dim, size in enumerate(held.shape) if size != whole.shape[dim]), None)
    return whole if dim is None else whole.chunk(2, dim)[rank]


def states_of(run):
    """Weights, and what this replica steps and keeps of them."""
    inner = run.optimizer.optim
    stepped = [each for group in inner.param_groups for each in group["params"]]
    kept = [value for each in stepped for value in inner.state.get(each, {}).values()]
    return [torch.as_tensor(each).detach().clone() for each in (*run.model.parameters(), *stepped, *kept)]
