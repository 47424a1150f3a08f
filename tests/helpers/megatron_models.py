"""Small models of Megatron-Core on CPU ranks: what it asks of CUDA is answered here, in tests alone."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

VOCABULARY, LENGTH, BATCH, WIDTH = 64, 8, 4, 32


@contextlib.contextmanager
def megatron_on_cpu(tensor_parallel, seed=0, **sizes):
    """Megatron-Core's process groups over all ranks of the job, and its answers from CUDA, while the block lasts."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random as of_megatron
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def on_cpu(make):
        def made(*args, device=None, **options):
            return make(*args, device="cpu" if str(device).startswith("cuda") else device, **options)

        return made

    make_norm = WrappedTorchNorm.__new__

    def norm_of_a_sequence(kind, config, *given, **options):
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = make_norm(kind, without, *given, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    tensor_type = torch.Tensor.type

    def type_on_cuda(tensor, *given, **options):
        kind = tensor_type(tensor, *given, **options)
        return kind.replace("torch.", "torch.cuda.") if isinstance(kind, str) else kind

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    patches = [
        # It loads what TransformerEngine's Adam keeps, which counts steps elsewhere.
        mock.patch.object(
            DistributedOptimizer,
            put.__name__,
            lambda optimizer, weight, tensors: put(optimizer, weight, {"step": None, **tensors}),
        ),
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: None),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(of_megatron.CudaRNGStatesTracker, "fork", lambda self, *_: contextlib.nullcontext()),
        mock.patch.object(of_megatron, "_get_all_rng_states", lambda: (torch.get_rng_state(), None, {})),
        mock.patch.object(of_megatron, "_set_all_rng_states", lambda state, *_: torch.set_rng_state(state)),
        mock.patch.object(torch.Tensor, "type", type_on_cuda),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(WrappedTorchNorm, "__new__", norm_of_a_sequence),
        *(
            mock.patch.object(torch, name, on_cpu(getattr(torch, name)))
            for name in ("tensor", "zeros", "empty", "ones")
        ),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel, **sizes)
        torch.manual_seed(seed)
        try:
            yield parallel_state.get_tensor_model_parallel_group()
        finally:
            parallel_state.destroy_model_parallel()


def config_of(**options):
    """A LLaMA-like configuration of eight heads in four groups, with whatever else is given."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {
        "num_layers": 2,
        "hidden_size": WIDTH,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 48,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }
    return TransformerConfig(**given | options)


def gpt(config, dtype=torch.float32, **options):
    """A GPTModel of local layers, the same whole model on every rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    torch.manual_seed(0)
    given = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "position_embedding_type": "rope"}
    return GPTModel(config, spec, **given | {"share_embeddings_and_output_weights": False} | options).to(dtype)


def hybrid(config, dtype=torch.float32, **options):
    """A HybridModel of attention and feed-forward layers, which are GPTModel's local ones."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    whole = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm).submodules
    attention, mlp = (
        ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(**{name: getattr(whole, name) for name in names})
        )
        for names in (("input_layernorm", "self_attention", "self_attn_bda"), ("pre_mlp_layernorm", "mlp", "mlp_bda"))
    )
    layers = hybrid_block.HybridStackSubmodules(attention_layer=attention, mlp_layer=mlp)
    torch.manual_seed(0)
    given = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "position_embedding_type": "rope"}
    with mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm):
        spec = ModuleSpec(hybrid_block.HybridStack, submodules=layers)
        return HybridModel(config, spec, hybrid_layer_pattern="*-*-", **given | options).to(dtype)


def batch_of(step):
    """Words, positions, the mask of later tokens, and labels."""
    words = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).view(1, 1, LENGTH, LENGTH)
    return words[:, :-1].contiguous(), positions, mask, words[:, 1:].contiguous()


def loss_of(model, step):
    """By Megatron-Core's own loss, which is of float32; where the model gathers its logits, in their precision."""
    words, positions, mask, labels = batch_of(step)
    if model.parallel_output:
        return model(words, positions, mask, labels=labels).mean()
    return F.cross_entropy(model(words, positions, mask).flatten(0, 1), labels.flatten())


def whole_of(model, group, held=torch.Tensor.detach):
    """What the undivided model holds, by name: its weights, or what else is held of each; units are at home."""
    whole = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.").removeprefix("module.")
        whole[name] = held(parameter).clone()
        if getattr(parameter, "tensor_model_parallel", False) and dist.get_world_size(group) > 1:
            parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, held(parameter).contiguous(), group=group)
            cut = [part.chunk(parameter.partition_stride, parameter.partition_dim) for part in parts]
            strides = range(parameter.partition_stride)
            whole[name] = torch.cat([of_rank[number] for number in strides for of_rank in cut], parameter.partition_dim)
    return whole


@torch.no_grad()
def divide(whole, model, group):
    """Give ``model`` its rank's parts of what :func:`whole_of` returned."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for name, parameter in model.named_parameters():
        tensor = whole[name.removeprefix("module.").removeprefix("module.")]
        if getattr(parameter, "tensor_model_parallel", False):
            pieces = tensor.chunk(parameter.partition_stride, parameter.partition_dim)
            parts = [piece.chunk(ranks, parameter.partition_dim)[rank] for piece in pieces]
            tensor = torch.cat(parts, parameter.partition_dim)
        parameter.copy_(tensor)


def sum_partial_gradients(model, group):
    """As Megatron-Core's finalize_model_grads does: of norms that see parts of a sequence, or of the heads."""
    for name, parameter in model.named_parameters():
        is_of_heads = name.split(".")[-2] in ("q_layernorm", "k_layernorm")
        if (is_of_heads or getattr(parameter, "sequence_parallel", False)) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def learner(model, *, overlaps=False, is_divided=False, lr=1e-3, eps=1e-5, bucket_size=None, **options):
    """Megatron-Core's DistributedDataParallel of a model, and its optimizer, which clips; in parts or not."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_half = next(model.parameters()).dtype == torch.bfloat16
    of_wrapper = DistributedDataParallelConfig(
        overlap_grad_reduce=overlaps,
        use_distributed_optimizer=is_divided,
        grad_reduce_in_fp32=is_half,
        bucket_size=bucket_size,
        overlap_param_gather=options.get("overlap_param_gather", False),
    )
    wrapped = DistributedDataParallel(model.config, of_wrapper, model)
    given = {"optimizer": "adam", "lr": lr, "adam_eps": eps, "weight_decay": 0.1, "clip_grad": 0.5, "bf16": is_half}
    given["decoupled_lr"] = lr  # embeddings are a group of their own
    config = OptimizerConfig(**given | {"use_distributed_optimizer": is_divided} | options)
    return wrapped, get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)


def update(wrapped, optimizer, step, replica, num_replicas, micro_batches=2):
    """One update by micro-batches of a replica; returns their losses."""
    from megatron.core.distributed import finalize_model_grads

    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    losses = []
    for number in range(micro_batches):
        is_last = number == micro_batches - 1
        with contextlib.nullcontext() if is_last else wrapped.no_sync():
            loss = loss_of(wrapped.module, (step * micro_batches + number) * num_replicas + replica)
            loss.backward()
        losses.append(loss.item())
    finalize_model_grads([wrapped])
    succeeded, *_ = optimizer.step()
    assert succeeded
    return losses


def undivided_run(config, steps, num_replicas, micro_batches=2, **options):
    """Of the undivided model, by torch's optimizer and clipping: whole weights before and after, losses by step."""
    model = gpt(config, parallel_output=False, **options)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1)
    losses = []
    for step in range(steps):
        for number in range(micro_batches * num_replicas):
            loss = loss_of(model, step * micro_batches * num_replicas + number)
            (loss / num_replicas).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return before, dict(model.named_parameters()), losses
