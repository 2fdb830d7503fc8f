"""Makes PyTorch's mps a platform of vLLM (vllm.platforms.interface)."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from typing import Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from torch_gdn.distributed import INTERFACE
from torch_gdn.reference.aura import TILE
from torch_gdn_engines.vllm import require_mps

HERE = "torch_gdn_engines.vllm"
TIMEOUT = 600  # seconds that processes wait for each other, at the start and in a step; PyTorch's default is 1,800
BLOCK_SIZE = (
    32  # tokens per block of keys and values, unless the user or a hybrid model's states require another number
)


class MpsPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "mps"  # a device string: vLLM makes torch.device("mps:0") of it
    device_type = "mps"
    dispatch_key = "MPS"
    dist_backend = "torch_gdn"  # torch_gdn.distributed, which the worker imports
    simple_compile_backend = "eager"

    def __init__(self) -> None:
        require_mps()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype: expected bfloat16, float16 or float32 on mps, got {dtype}")

    # The device

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return torch.backends.mps.get_name()

    @classmethod
    def current_device(cls) -> torch.device:
        return torch.device("mps:0")

    @classmethod
    def set_device(cls, device: torch.device) -> None: ...

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return torch.mps.recommended_max_memory()

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return torch.mps.current_allocated_memory()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.mps.manual_seed(seed)

    # Kernels

    @classmethod
    def import_kernels(cls) -> None:
        """Imports nothing: on a Mac, vllm._C has no GPU kernels and may be missing."""

    @classmethod
    @cache
    def register_triton_kernel_overrides(cls) -> None:
        from vllm.triton_utils.dispatcher import register_kernels

        from torch_gdn_engines.vllm.kernels import OVERRIDES

        register_kernels(OVERRIDES)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if attn_selector_config.use_mla or attn_selector_config.use_sparse:
            raise NotImplementedError("attention on mps: expected full attention, got MLA or sparse attention")
        from torch_gdn_engines.vllm.aura_attention import backend_path

        return backend_path()

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return f"{HERE}.lora.TorchGdnPunicaWrapper"

    # What the engine may do

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None: ...

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        from torch_gdn_engines.vllm import quantized

        quantized.verify(quant)

    @classmethod
    def check_division(cls, config: Any) -> None:
        """Refuses drafts in a pipeline: vLLM 0.32 looks for a drafter in each process, but only the last one has it.
        Refuses packed weights that are cut, since their groups would be cut too.
        """
        parallel, drafts, model = config.parallel_config, config.speculative_config, config.model_config
        if (size := parallel.pipeline_parallel_size) > 1 and drafts is not None:
            got = drafts.method
            raise ValueError(f"speculative_config: expected none with pipeline_parallel_size {size} on mps, got {got}")
        if (size := parallel.tensor_parallel_size) > 1 and model is not None and model.quantization is not None:
            raise ValueError(
                f"tensor_parallel_size: expected 1 for packed weights ({model.quantization}) on mps, got {size}: use "
                f"pipeline_parallel_size {size}"
            )

    @classmethod
    def check_processes(cls, parallel: Any) -> None:
        """Names the interface that gloo uses, which would otherwise be that of the host's name. Refuses Ray, which has
        no Metal device to give.
        """
        if parallel.distributed_executor_backend == "ray":
            raise ValueError("distributed_executor_backend: expected mp on mps, got ray: use --nnodes")
        if parallel.nnodes > 1:
            cls.check_network(parallel)
        os.environ.setdefault(INTERFACE, "lo0" if sys.platform == "darwin" else "lo")
        if parallel.distributed_timeout_seconds is None:
            parallel.distributed_timeout_seconds = TIMEOUT
        if parallel.cpu_distributed_timeout_seconds is None:  # of the groups that say what is sent
            parallel.cpu_distributed_timeout_seconds = parallel.distributed_timeout_seconds

    @classmethod
    def check_network(cls, parallel: Any) -> None:
        """Refuses an interface and addresses that this machine does not have. Without VLLM_HOST_IP vLLM would listen on
        the network that has the default route.
        """
        names, interface = [name for _, name in socket.if_nameindex()], os.environ.get(INTERFACE)
        if interface not in names:
            raise ValueError(
                f"{INTERFACE}: expected the interface of the private network between the machines, one of "
                f"{', '.join(names)}, got {interface or 'none'}"
            )
        own = {"VLLM_HOST_IP": os.environ.get("VLLM_HOST_IP")}
        if parallel.node_rank == 0:
            own["master_addr"] = parallel.master_addr
        for name, address in own.items():
            try:
                socket.create_server((address or "none", 0)).close()
            except OSError as error:
                raise ValueError(
                    f"{name}: expected this machine's address on the private network, got {address or 'none'} ({error})"
                ) from error

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.config import CompilationMode
        from vllm.config.compilation import CUDAGraphMode

        from torch_gdn_engines.vllm import kv_cache_dtype, ring_buffers

        kv_cache_dtype.move_to_additional_config(vllm_config)
        model = vllm_config.model_config
        if model is not None and model.quantization is not None:
            from torch_gdn_engines.vllm import quantized

            load = vllm_config.load_config
            load.load_format = quantized.load_format_of(model.quantization, load.load_format)
        elif model is not None and model.model_arch_config.quantization_config:
            cls.verify_quantization("a quantization_config without a quant_method")
        parallel = vllm_config.parallel_config
        if parallel.world_size > 1:
            cls.check_division(vllm_config)
            cls.check_processes(parallel)
        if parallel.worker_cls == "auto":
            parallel.worker_cls = f"{HERE}.worker.MpsWorker"
        parallel.disable_custom_all_reduce = True
        vllm_config.scheduler_config.async_scheduling = False  # it copies sampled tokens in a second stream
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []
        cache = vllm_config.cache_config
        # vLLM's EngineCore updates its configuration again when the pools exist, whose blocks may be larger by then.
        if not cache.user_specified_block_size and cache.num_gpu_blocks is None:
            cache.block_size = TILE if ring_buffers.wants_means(vllm_config) else BLOCK_SIZE
        if cache.mamba_cache_dtype == cache.mamba_ssm_cache_dtype == "auto":
            cache.mamba_ssm_cache_dtype = "float32"  # as in transformers; vLLM's auto is the model's dtype
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # V2 is Triton throughout
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # Metal does not survive a fork
