"""vLLM's worker for mps. It has no streams, memory pools or graphs. The size of the KV cache depends on what Metal
recommends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, set_current_vllm_config
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from torch_gdn import _C
from torch_gdn.distributed import Ring, check_agreement  # its module registers the platform's back end
from torch_gdn.memory import bytes_when_loaded, check_memory
from torch_gdn_engines.vllm import compat, ends, ring_buffers
from torch_gdn_engines.vllm.model_runner import MpsModelRunner
from torch_gdn_engines.vllm.warmup import compile_kernels

logger = init_logger(__name__)


SMALL_MEMORY = 24 << 30  # bytes; below, vLLM's default share leaves too little for macOS and other programs
SHARE_OF_SMALL_MEMORY = 0.7


def share_of_memory(asked: float) -> float:
    """Returns the part of Metal's recommendation that vLLM may take. A small Mac gets less than vLLM's default."""
    default = CacheConfig().gpu_memory_utilization
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return SHARE_OF_SMALL_MEMORY if asked == default and memory < SMALL_MEMORY else asked


def pools_in_buffers(layers: Sequence[int], longest: int) -> int:
    """Returns how many bytes of pools fit into Metal's buffers, which have at most `longest` bytes each.

    `layers` has the number of layers of each kind. vLLM allocates one tensor for each layer of the rarest kind. The
    layers of other kinds share these tensors.
    """
    return min(layers, default=1) * longest


def description_of(model_config: Any) -> str:
    """Returns a model's name, and a digest of its configuration and of the sizes of its files. It has no paths."""
    folder = Path(model_config.model)
    configuration = {name: x for name, x in model_config.hf_config.to_dict().items() if name != "_name_or_path"}
    files = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
    facts = json.dumps([configuration, files, str(model_config.dtype)], sort_keys=True, default=str)
    return f"{folder.name} ({hashlib.sha256(facts.encode()).hexdigest()[:12]})"


def settings_of(config: Any) -> dict[str, Any]:
    """Returns the settings that a worker takes from its own machine's command, although all machines need the same."""
    parallel, cache, scheduler = config.parallel_config, config.cache_config, config.scheduler_config
    drafts = config.speculative_config
    layers, parts = config.model_config.get_total_num_hidden_layers(), parallel.pipeline_parallel_size
    ends = (get_pp_indices(layers, part, parts) for part in range(parts))
    return {
        "pipeline_parallel_size": parts,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "VLLM_PP_LAYER_PARTITION": ",".join(str(end - start) for start, end in ends),
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "kv_cache_dtype": cache.cache_dtype,
        "mamba_ssm_cache_dtype": cache.mamba_ssm_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "speculative_config": (drafts.method, drafts.num_speculative_tokens) if drafts else None,
        "additional_config": config.additional_config,
    }


class MpsWorker(Worker):
    ring: Ring | None = None

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        return contextlib.nullcontext()

    def init_device(self) -> None:
        compat.replace_in_worker()
        self.device = torch.device("mps:0")
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        os.environ["LOCAL_WORLD_SIZE"] = str(self.parallel_config.world_size)
        if self.parallel_config.world_size > 1:
            compat.check_before_groups(self.check_agreements)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            compat.on_one_address(self.distributed_init_method),
            self.local_rank,
            current_platform.dist_backend,
        )
        if self.parallel_config.world_size > 1:
            self.ring = Ring(ends.end_process, ends.patience())
            threading.Thread(target=ends.end_with_parent, daemon=True).start()
        set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def check_agreements(self) -> None:
        check_agreement("model", description_of(self.model_config))
        for name, value in settings_of(self.vllm_config).items():
            check_agreement(name, str(value))

    def _make_model_runner(self) -> MpsModelRunner:
        if self.use_v2_model_runner:
            raise RuntimeError("VLLM_USE_V2_MODEL_RUNNER: expected 0 on mps, since model runner V2 uses Triton kernels")
        return MpsModelRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model. Refuses one that is larger than Metal recommends before reading any of it."""
        folder = Path(self.model_config.model)
        if not load_dummy_weights and self.load_config.load_format != "dummy" and folder.is_dir():
            needed = bytes_when_loaded(folder.glob("*.safetensors"), self.model_config.dtype)
            check_memory(f"the weights in {folder}", needed, self.device)
        super().load_model(load_dummy_weights=load_dummy_weights)

    def determine_available_memory(self) -> int:
        """Returns the bytes for the pools: the share of Metal's recommendation, less weights, a step and exact rows."""
        asked: int | None = self.cache_config.kv_cache_memory_bytes
        if asked is not None:
            return asked
        limit = torch.mps.recommended_max_memory() * share_of_memory(self.cache_config.gpu_memory_utilization)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        torch.mps.synchronize()
        kinds = Counter(repr(spec) for spec in self.get_kv_cache_spec().values())
        largest = pools_in_buffers(list(kinds.values()), _C.device_facts()["max_buffer_length"])
        free = int(limit - torch.mps.driver_allocated_memory()) - ring_buffers.bytes_of_pools(self.vllm_config)
        available = min(int(free / (1 + ring_buffers.share_of_means(self.vllm_config))), largest)
        torch.mps.empty_cache()
        logger.info("mps: %.2f GiB for the pools", available / 2**30)
        return available

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compiles what the model's layers launch, before the first request."""
        seconds = compile_kernels(self.model_runner)
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def shutdown(self) -> None:
        if self.ring:
            self.ring.leave()
        super().shutdown()

    # vLLM pauses its scheduler before it calls these methods. An error would leave the scheduler paused.

    def sleep(self, level: int = 1) -> None:
        logger.warning("sleep: mps has no sleep mode; weights and pools stay in memory")

    def wake_up(self, tags: Any = None) -> None:
        logger.warning("wake_up: mps has no sleep mode; weights and pools stayed in memory")
