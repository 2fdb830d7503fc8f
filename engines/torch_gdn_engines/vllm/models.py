"""Supports small models of Qwen3-Next: without experts, with tied embeddings.

transformers takes both. vLLM's class raises at the former, and leaves lm_head uninitialised at the latter.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM


class DenseQwen3NextForCausalLM(Qwen3NextForCausalLM):
    lm_head: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

    def set_moe_parameters(self) -> None:
        if getattr(self.config, "num_experts", 0) > 0:
            super().set_moe_parameters()
            return
        self.moe_layers: list[Any] = []
        self.num_moe_layers = self.num_expert_groups = self.num_shared_experts = 0
        self.num_logical_experts = self.num_physical_experts = self.num_local_physical_experts = 0
        self.num_routed_experts = self.num_redundant_experts = 0


def register() -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("Qwen3NextForCausalLM", f"{__name__}:DenseQwen3NextForCausalLM")
