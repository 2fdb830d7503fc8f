"""Compiles the kernels that a model's layers launch, before the first request.

To find the kernels, it records calls of the layers. No kernel runs for these calls.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

import torch_gdn
from torch_gdn.integrations import serving
from torch_gdn.integrations.experts import fused_experts
from torch_gdn.tools.warmup import compile_missing, sizes_up_to


@torch.no_grad()
def compile_kernels(runner: Any) -> float:
    """Compiles the kernels and returns the elapsed seconds."""
    begin = time.perf_counter()
    scheduler = runner.vllm_config.scheduler_config
    tokens, sequences = sizes_up_to(scheduler.max_num_batched_tokens), sizes_up_to(scheduler.max_num_seqs)
    compile_missing(serving.working_variants(lambda: call_layers(runner, tokens, sequences)))
    return time.perf_counter() - begin


def call_layers(runner: Any, tokens: list[int], sequences: list[int]) -> None:
    layers = runner.compilation_config.static_forward_context.values()
    for layer in distinct_layers(layer for layer in layers if hasattr(layer, "kv_cache")):
        if hasattr(layer, "impl"):
            call_attention(runner, layer, tokens, sequences)
        else:
            call_delta_rule(runner, layer, tokens, sequences)
    call_modules(runner)
    call_experts(runner)
    call_packed_matrices(runner)
    call_inputs(runner)
    if runner.cache_config.mamba_cache_mode == "align":  # states move between blocks
        pool, first = torch.zeros(16, dtype=torch.uint8, device=runner.device), torch.zeros(1, dtype=torch.int64)
        torch_gdn.batch_copy_(pool, first, first + 8, first + 4)


def call_inputs(runner: Any) -> None:
    """Calls what prepares a step's inputs: `compat.replace_copies` and `kernels.compute_slot_mapping`."""
    zeros = torch.zeros(2, dtype=torch.int64, device=runner.device)
    torch_gdn.copy_from_host_(zeros, zeros.cpu())
    torch_gdn.compute_slot_mapping(zeros[:1], zeros, zeros[None, :1], 16, zeros.clone())


def distinct_layers(layers: Any) -> list[Any]:
    """Returns one layer of each kind. The class, the shapes and dtypes of parameters and pools, the window, and whether
    the layer has exact rows make a kind."""
    kinds: dict[Any, Any] = {}
    for layer in layers:
        pools = layer.kv_cache if isinstance(layer.kv_cache, (list, tuple)) else [layer.kv_cache]
        shapes = tuple((tuple(x.shape), x.stride(), x.dtype) for x in [*layer.parameters(), *pools])
        impl = getattr(layer, "impl", None)
        has_exact_rows = getattr(impl, "exact", None) is not None
        kinds.setdefault((type(layer), getattr(impl, "window", None), has_exact_rows, shapes), layer)
    return list(kinds.values())


def call_modules(runner: Any) -> None:
    """Calls the norms, the rotary embeddings, Qwen's gated attention, and SwiGLU."""
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    from torch_gdn_engines.vllm import layers, rotary

    def zeros(columns: int) -> torch.Tensor:
        return torch.zeros(1, columns, dtype=runner.dtype, device=runner.device)

    position = torch.zeros(1, dtype=torch.int64, device=runner.device)
    for module in runner.model.modules():
        if isinstance(module, (layers.TorchGdnRMSNorm, layers.TorchGdnGemmaRMSNorm)):
            x = zeros(module.weight.shape[0])
            module(x, x)
        elif isinstance(module, rotary.ROTATIONS):
            module(position, zeros(module.head_size), zeros(module.head_size))
        elif isinstance(module, rotary.TorchGdnSiluAndMul):
            module(zeros(2 * (getattr(runner.model_config.hf_text_config, "intermediate_size", None) or 4)))
        elif isinstance(module, Qwen3NextAttention) and rotary.is_taken(module, position):
            *_, gate = rotary.project(module, zeros(2 * (module.q_size + module.kv_size)), position, position)
            rotary.gated(torch.zeros_like(gate), gate)


def call_experts(runner: Any) -> None:
    """Calls the experts for one token, for a few and for many, because the number decides the kernels."""
    from torch_gdn_engines.vllm import moe
    from torch_gdn_engines.vllm.quantized_layers import classes_of_experts

    known = classes_of_experts()
    for module in runner.model.modules():
        layer: Any = getattr(module, "routed_experts", None)
        if type(getattr(layer, "quant_method", None)) not in known.experts:
            continue
        shared = moe.shared_expert_of(module, known)
        for n in (1, 2, 33):
            x = torch.zeros(n, layer.hidden_size, dtype=runner.dtype, device=runner.device)
            logits = torch.zeros(n, module.router.global_num_experts, dtype=runner.dtype, device=runner.device)
            logits = logits if module.gate is None else module.gate(x)[0]
            ids = torch.zeros(n, module.router.top_k, dtype=torch.int32, device=runner.device)
            weights, ids = moe.topk_softmax(ids, ids, ids, logits)
            fused_experts(x, *moe.experts_of(layer), weights, ids, shared)


def call_packed_matrices(runner: Any) -> None:
    """Calls packed experts, and one packed linear layer of each shape."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    from torch_gdn_engines.vllm.quantized_layers import PackedLinearMethod

    layers: list[Any] = [
        each for each in runner.model.modules() if isinstance(getattr(each, "quant_method", None), PackedLinearMethod)
    ]
    for layer in {(x.weight.shape, x.scales.shape, x.scales.dtype, type(x)): x for x in layers}.values():
        columns = layer.weight.shape[1] * layer.quant_method.packing.per_word
        for n in (1, 2, 4, 8, 33):
            x = torch.zeros(n, columns, dtype=runner.dtype, device=runner.device)
            layer.quant_method.apply(layer, x)
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            layer.quant_method.embedding(layer, torch.zeros(1, dtype=torch.int64, device=runner.device))


def call_delta_rule(runner: Any, layer: Any, tokens: list[int], sequences: list[int]) -> None:
    from torch_gdn_engines.vllm import gated_delta_net
    from torch_gdn_engines.vllm.layers import state_of

    def run(metadata: SimpleNamespace) -> None:
        heads = layer.num_v_heads // layer.tp_size
        columns = (2 * layer.key_dim + layer.value_dim) // layer.tp_size
        options = {"dtype": runner.dtype, "device": runner.device}
        rows = metadata.num_actual_tokens
        mixed, gate = torch.zeros(rows, columns, **options), torch.zeros(rows, heads, **options)
        out = torch.zeros(rows, heads, layer.head_v_dim, **options)
        gated_delta_net.decode(state_of(layer), metadata, mixed, out.flatten(1), gate, gate)
        gated_delta_net.forward(state_of(layer), metadata, mixed, gate, gate, out)
        norm = layer.norm if hasattr(layer, "norm") else layer.o_norm
        norm(out, out)

    for n in sequences:
        run(batch(decodes=n, device=runner.device))
        if layer.num_spec:
            run(batch_of_drafts(n, 1 + layer.num_spec, runner.device))
    for n in tokens:
        run(batch(prompt=n, device=runner.device))


def batch(*, decodes: int = 0, prompt: int = 0, device: torch.device) -> SimpleNamespace:
    """Returns the metadata of sequences with one token each, or of a prompt."""
    return SimpleNamespace(
        num_actual_tokens=decodes + prompt,
        num_decodes=decodes,
        num_prefills=int(prompt > 0),
        spec_sequence_masks=None,
        non_spec_state_indices_tensor=torch.zeros(decodes or 1, dtype=torch.int32, device=device),
        non_spec_query_start_loc=torch.tensor([0, prompt], dtype=torch.int32, device=device),
        has_initial_state=torch.zeros(1, dtype=torch.bool, device=device),
    )


def batch_of_drafts(n: int, each: int, device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(
        num_actual_tokens=n * each,
        num_decodes=0,
        num_prefills=0,
        num_spec_decodes=n,
        spec_sequence_masks=torch.ones(n, dtype=torch.bool, device=device),
        spec_state_indices_tensor=torch.zeros(n, each, dtype=torch.int32, device=device),
        spec_query_start_loc=torch.arange(0, n * each + 1, each, dtype=torch.int32, device=device),
        num_accepted_tokens=torch.ones(n, dtype=torch.int32, device=device),
    )


def call_attention(runner: Any, layer: Any, tokens: list[int], sequences: list[int]) -> None:
    from torch_gdn_engines.vllm.attention import PagedMetadata

    options = {"dtype": torch.int32, "device": runner.device}
    blocks = max(table.max_num_blocks_per_req for table in runner.input_batch.block_table.block_tables)
    longest = runner.max_model_len
    for n, each in [(n, 1) for n in sequences] + [(1, n) for n in tokens]:
        rows = n * each
        query = torch.zeros(rows, layer.num_heads, layer.head_size, dtype=runner.dtype, device=runner.device)
        key = torch.zeros(rows, layer.num_kv_heads, layer.head_size, dtype=runner.dtype, device=runner.device)
        slots = torch.full((rows,), -1, dtype=torch.int64, device=runner.device)
        layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, slots)
        for seq_len in (each, longest):
            metadata = PagedMetadata(
                num_actual_tokens=rows,
                slot_mapping=slots,
                block_table=torch.zeros(n, blocks, **options),
                cu_seqlens=torch.arange(0, rows + 1, each, **options),
                seq_lens=torch.full((n,), seq_len, **options),
                max_query_len=each,
                max_seq_len=seq_len,
                causal=True,
            )
            if getattr(layer.impl, "exact", None) is not None:  # before the first step, no request has a slot
                metadata.exact = layer.impl.exact.slots.step(metadata.cu_seqlens, metadata.seq_lens, rows)
            layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata, torch.empty_like(query))
