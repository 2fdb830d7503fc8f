"""The model runner: vLLM's V1 runner without CUDA's graphs and copies."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from torch_gdn.integrations.vllm.exact_rows import KeepsExactRows
from torch_gdn.integrations.vllm.seeds import KeepsSeeds


class MpsModelRunner(KeepsSeeds, KeepsExactRows, GPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.use_cuda_graph = False

    def load_model(self, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise NotImplementedError("load_dummy_weights: expected False on mps")
        self.model = get_model(vllm_config=self.vllm_config)
        if self.lora_config:
            self.model = self.load_lora_model(self.model, self.vllm_config, self.device)
        if hasattr(self, "drafter"):
            self.drafter.load_model(self.model)
        self.model_memory_usage = torch.mps.current_allocated_memory()

    def get_model(self) -> torch.nn.Module:
        return self.model

    def _sync_device(self) -> None:
        torch.mps.synchronize()

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        return sampled_token_ids.tolist()

    # A block's old content is never read: attention stops at a sequence's length, and a new state starts from zeros.

    def _init_kv_zero_meta(self) -> None:
        pass

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        pass
