"""Compiles the kernels that the model's layers launch, before the first request. It records calls of the
layers and runs none of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_gdn.integrations import serving
from torch_gdn.tools.warmup import compile_missing, sizes_up_to
from torch_gdn_engines.sglang import kernels, quantized, tracking

logger = logging.getLogger(__name__)


def then_compile(theirs: Callable[..., None], runner: Any, *others: Any, **options: Any) -> None:
    """Wraps ModelRunner.init_cuda_graphs, the last step before SGLang takes requests."""
    theirs(runner, *others, **options)
    begin = time.perf_counter()
    with torch.no_grad():
        compile_missing(serving.working_variants(lambda: Layers(runner).call()))
    logger.info("torch_gdn compiled the model's kernels in %.1f s", time.perf_counter() - begin)


class Layers:
    def __init__(self, runner: Any) -> None:
        from sglang.srt.runtime_context import get_schedule

        chunk = get_schedule().chunked_prefill_size
        most = chunk if chunk and chunk > 0 else runner.max_total_num_tokens
        self.runner = runner
        self.tokens, self.sequences = sizes_up_to(most), sizes_up_to(runner.max_running_requests)
        self.options: dict[str, Any] = {"dtype": runner.dtype, "device": runner.device}

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, **self.options)

    def numbers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.runner.device)

    def of(self, *names: str) -> Iterator[Any]:
        """Returns one module of each kind, by class and by the shapes and dtypes of its parameters."""
        kinds: dict[Any, Any] = {}
        for module in self.runner.model.modules():
            if type(module).__name__ in names:
                shapes = tuple((tuple(x.shape), x.dtype) for x in module.parameters())
                heads = getattr(module, "tp_q_head_num", None), getattr(module, "sliding_window_size", None)
                kinds.setdefault((type(module), shapes, heads), module)
        return iter(kinds.values())

    def call(self) -> None:
        for layer in self.of("RadixLinearAttention"):
            self.call_delta_rule(layer)
        for layer in self.of("RadixAttention"):
            self.call_attention(layer)
        for norm in self.of("GemmaRMSNorm"):
            x = self.zeros(1, norm.weight.shape[0])
            norm(x)
            norm(x, x)
        for norm in self.of("FusedRMSNormGated", "RMSNorm"):
            if not hasattr(norm, "variance_epsilon"):  # SGLang's plain norm has the same name
                for n in self.tokens:
                    x = self.zeros(n, norm.weight.shape[0])
                    norm(x, x)
        for layer in self.of("FusedMoE"):
            self.call_experts(layer)
        for layer in self.of(
            "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear", "ReplicatedLinear"
        ):
            if isinstance(layer.quant_method, quantized.PackedLinearMethod):
                self.call_packed_linear(layer)

    def call_delta_rule(self, layer: Any) -> None:
        cache = self.runner.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        columns, states, rule = cache.conv[0], cache.temporal, kernels.DeltaRule()
        conv, width = (layer.conv_weights, layer.bias), layer.q_dim + layer.k_dim + layer.v_dim
        for n in self.sequences:
            slots = torch.zeros(n, dtype=torch.int32, device=self.runner.device)
            gate = self.zeros(n, layer.num_v_heads)
            kernels.convolve_tokens(self.zeros(n, width), columns, *conv, layer.activation, conv_state_indices=slots)
            where = {"ssm_states": states, "cache_indices": slots, "query_start_loc": slots}
            rule.decode(*self.heads(layer, n), gate, gate, A_log=layer.A_log, dt_bias=layer.dt_bias, **where)
        slot, tracked = self.numbers(0), states.new_zeros(1, *states.shape[1:], dtype=torch.float32)
        for n in self.tokens:
            gate, ends = self.zeros(n, layer.num_v_heads), self.numbers(0, n)
            x = self.zeros(n, width).t()
            kernels.convolve_prompts(x, *conv, columns, ends, None, slot, slot.bool(), layer.activation)
            g, beta = kernels.gating(layer.A_log, gate, gate, layer.dt_bias)
            where = {"ssm_states": states, "cache_indices": slot, "query_start_loc": ends}
            rule.extend(*self.heads(layer, n), g, beta, **where)
            rule.extend(*self.heads(layer, n), g, beta, track_state=tracked, track_chunk_idx=slot, **where)
        tracking.track_one_layer(columns, states, slot, slot.bool(), slot, 1)

    def heads(self, layer: Any, n: int) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.zeros(1, n, layer.num_k_heads, layer.head_k_dim)
        return keys, keys, self.zeros(1, n, layer.num_v_heads, layer.head_v_dim)

    def call_attention(self, layer: Any) -> None:
        backend = getattr(self.runner.attn_backend, "full_attn_backend", self.runner.attn_backend)
        longest = self.runner.model_config.context_len
        size = layer.qk_head_dim
        for n, each in [(n, 1) for n in self.sequences] + [(1, n) for n in self.tokens]:
            q, k = self.zeros(n * each, layer.tp_q_head_num * size), self.zeros(n * each, layer.tp_k_head_num * size)
            for seq_len in (each, longest):
                backend.forward_metadata = serving.PagedBatch(
                    block_table=torch.zeros(n, seq_len, dtype=torch.int32, device=self.runner.device),
                    cu_seqlens=torch.arange(0, n * each + 1, each, dtype=torch.int32, device=self.runner.device),
                    seq_lens=torch.full((n,), seq_len, device=self.runner.device),
                    max_query_len=each,
                    max_seq_len=seq_len,
                )
                if backend.takes(layer, k, True):
                    backend.attend(q, k, k, layer, torch.zeros(n * each, dtype=torch.int64, device=self.runner.device))
        backend.forward_metadata = None

    def call_packed_linear(self, layer: Any) -> None:
        columns = layer.weight.shape[1] * layer.quant_method.packing.per_word
        for n in (1, 2, 4, 8, 33):
            layer.quant_method.apply(layer, self.zeros(n, columns))

    def call_experts(self, layer: Any) -> None:
        """Calls the experts for one token, for a few and for many, because the number decides the kernels."""
        for n in (1, 2, 33):
            x, logits = self.zeros(n, layer.hidden_size), self.zeros(n, layer.num_experts)
            weights, ids = kernels.router(unexpected, x, logits, layer.top_k, True)
            kernels.experts(unexpected, layer, x, (weights, ids, logits), layer.moe_runner_config)


def unexpected(*others: Any, **options: Any) -> Any:
    """Compiles nothing, because SGLang computes these experts itself."""
