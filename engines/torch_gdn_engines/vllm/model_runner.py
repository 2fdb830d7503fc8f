"""The model runner: vLLM's V1 runner without CUDA's graphs and copies."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.model_loader import get_model
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import MultiGroupBlockTable
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from torch_gdn_engines.vllm.ring_buffers import KeepsExactRows
from torch_gdn_engines.vllm.seeds import KeepsSeeds


class JoinedBlockTables(MultiGroupBlockTable):
    """Makes the tables of all groups columns of one table, so that one launch copies them to the device."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        tables = [group.block_table for group in self.block_tables]
        columns = [table.cpu.shape[1] for table in tables]  # none in a model without a cache
        size = kwargs["max_num_reqs"], sum(columns)
        self.joined = CpuGpuBuffer(*size, dtype=torch.int32, device=kwargs["device"])
        parts = zip(tables, self.joined.cpu.split(columns, 1), self.joined.gpu.split(columns, 1), strict=True)
        for table, cpu, gpu in parts:
            table.cpu, table.gpu, table.np = cpu, gpu, cpu.numpy()

    def commit_block_table(self, num_reqs: int) -> None:
        self.joined.copy_to_gpu(num_reqs)


class MpsModelRunner(KeepsSeeds, KeepsExactRows, GPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.use_cuda_graph = False
        if self.speculative_config is None:  # only drafters read this mask on the device
            self.discard_request_mask.copy_to_gpu = lambda count: self.discard_request_mask.gpu[:count]

    def load_model(self, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise NotImplementedError("load_dummy_weights: expected False on mps")
        self.model = get_model(vllm_config=self.vllm_config)
        if self.lora_config:
            self.model = self.load_lora_model(self.model, self.vllm_config, self.device)
        if hasattr(self, "drafter"):
            self.drafter.load_model(self.model)
        if not get_pp_group().is_first_rank:  # vLLM's dummy run makes them, which does not run if the pools have a size
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        self.model_memory_usage = torch.mps.current_allocated_memory()

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        return sampled_token_ids.tolist()

    def _prepare_padding_mask(self, num_tokens_unpadded: int, num_tokens_padded: int) -> torch.Tensor:
        """Returns the mask as it was made, without a launch: there are no graphs, for which batches are padded."""
        return self.is_padding[:num_tokens_padded]

    def _init_kv_zero_meta(self) -> None:
        """Clears no blocks: attention stops at a sequence's length, and a new state starts from zeros."""
