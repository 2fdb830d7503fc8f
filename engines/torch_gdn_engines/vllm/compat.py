"""Holds all run-time replacements in vLLM, and in torch for vLLM, in one place.

Checked with the versions below, model runner V1. The other modules register what vLLM has registries for (platform,
layers, attention, Triton kernels).
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor

import torch_gdn
from torch_gdn.distributed import SCHEME

MESSAGE_POLL = 1000  # milliseconds

# Streams and events: mps has one stream, in which everything is in order. V1's runner makes torch.cuda's, in its
# constructor and in each step.


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        """Waits, so that a caller who polls ends."""
        torch.mps.synchronize()
        return True

    def synchronize(self) -> None:
        torch.mps.synchronize()


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("mps:0")

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class View:
    """Shows a module with other values for some of its names."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def replace_streams() -> None:
    """Replaces streams in the two vLLM modules that use them; the rest of the process keeps torch's."""
    from vllm.v1.spec_decode import ngram_proposer_gpu
    from vllm.v1.worker import gpu_model_runner

    cuda = View(torch.cuda, Event=Event, Stream=Stream, current_stream=Stream, stream=lambda stream: stream)
    for module in (gpu_model_runner, ngram_proposer_gpu):
        module.torch = View(torch, Event=Event, cuda=cuda)


def on_one_address(init_method: str) -> str:
    """Returns the rendezvous with torch_gdn's scheme: its first process listens on the address alone."""
    return init_method.replace("tcp://", f"{SCHEME}://", 1) if init_method.startswith("tcp://") else init_method


def replace_rendezvous() -> None:
    """Lets vLLM's launch over several machines use `on_one_address`."""
    from vllm.distributed import parallel_state
    from vllm.utils.network_utils import get_distributed_init_method

    parallel_state.get_distributed_init_method = lambda ip, port: on_one_address(get_distributed_init_method(ip, port))


def check_before_groups(check: Callable[[], None]) -> None:
    """Runs `check` when all processes are there, before vLLM makes groups of them: groups that differ never start."""
    from vllm.v1.worker import gpu_worker

    make_groups = gpu_worker.ensure_model_parallel_initialized

    def ensure_model_parallel_initialized(*args: Any) -> None:
        check()
        make_groups(*args)

    gpu_worker.ensure_model_parallel_initialized = ensure_model_parallel_initialized


def replace_message_reads() -> None:
    """Lets a shutdown of vLLM interrupt its waits for another machine: for the connection and for messages."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    dequeue, wait_until_ready = MessageQueue.dequeue, MessageQueue.wait_until_ready

    def poll(self: Any) -> Any:
        ready = self.remote_socket.poll(MESSAGE_POLL)
        if not ready and self.shutting_down:
            raise RuntimeError("a process of this engine has ended")
        return ready

    def dequeue_or_end(self: Any, timeout: float | None = None, indefinite: bool = False) -> Any:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while self._is_remote_reader and not poll(self) and time.monotonic() < end:
            pass
        return dequeue(self, None if timeout is None else max(0.0, end - time.monotonic()), indefinite)

    def wait_until_ready_or_end(self: Any) -> None:
        remote = self.remote_socket

        def recv() -> bytes:
            while not poll(self):
                pass
            return remote.recv()

        self.remote_socket = View(remote, recv=recv)
        try:
            wait_until_ready(self)
        finally:
            self.remote_socket = remote

    MessageQueue.dequeue = dequeue_or_end
    MessageQueue.wait_until_ready = wait_until_ready_or_end


def replace_worker_monitor() -> None:
    """Lets the process that starts workers kill one that is stopped. vLLM would wait for its end."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from torch_gdn_engines.vllm.ends import kill_stopped

    start = MultiprocExecutor.start_worker_monitor

    def start_worker_monitor(self: Any, inline: bool = False) -> None:
        workers = [psutil.Process(worker.proc.pid) for worker in self.workers]
        threading.Thread(target=kill_stopped, args=(workers,), daemon=True).start()
        start(self, inline)

    MultiprocExecutor.start_worker_monitor = start_worker_monitor


def replace_batch_defaults() -> None:
    """Gives machines that share a model the same default sizes of a step. vLLM's depend on the machine's memory, and a
    worker makes its buffers by its own machine's."""
    from vllm.engine import arg_utils

    theirs = arg_utils.EngineArgs.get_batch_defaults.__func__

    def get_batch_defaults(cls: Any, world_size: int) -> Any:
        platform = arg_utils.current_platform
        if world_size > 1:
            arg_utils.current_platform = View(platform, get_device_total_memory=lambda: 0)
        try:
            return theirs(cls, world_size)
        finally:
            arg_utils.current_platform = platform

    arg_utils.EngineArgs.get_batch_defaults = classmethod(get_batch_defaults)


def replace_copies() -> None:
    """Replaces the copies of small arrays, about ten per step. PyTorch's copy ends the stream's encoder each time."""
    from vllm.v1.utils import CpuGpuBuffer

    def copy_to_gpu(self: Any, n: int | None = None) -> Tensor:
        gpu: Tensor = self.gpu[:n]
        torch_gdn.copy_from_host_(gpu, self.cpu[:n])
        return gpu

    CpuGpuBuffer.copy_to_gpu = copy_to_gpu


def replace_block_tables() -> None:
    """Makes vLLM copy the block tables of all groups of layers in one launch, instead of in one launch each."""
    from vllm.v1.worker import gpu_input_batch

    from torch_gdn_engines.vllm.model_runner import JoinedBlockTables

    gpu_input_batch.MultiGroupBlockTable = JoinedBlockTables


def replace_convolution_metadata() -> None:
    """vLLM prepares each step with a prompt for its Triton convolution: six copies to the device, which nothing here
    reads."""
    from vllm.v1.attention.backends import gdn_attn

    def compute_causal_conv1d_metadata(*args: Any, **kwargs: Any) -> tuple[None, None, None]:
        return None, None, None

    gdn_attn.compute_causal_conv1d_metadata = compute_causal_conv1d_metadata


def replace_accelerator_functions() -> None:
    """torch.accelerator has no host allocator for mps, and its empty_host_cache() crashes; vLLM calls it at exit."""

    def empty_host_cache() -> None: ...

    def synchronize(device: Any = None) -> None:
        torch.mps.synchronize()

    torch.accelerator.empty_host_cache = empty_host_cache
    torch.accelerator.empty_cache = torch.mps.empty_cache
    torch.accelerator.synchronize = synchronize


def replace_uniform_probabilities() -> None:
    """Rejection sampling draws float64, which mps does not have. A float32 draw of 0 would accept a draft of
    probability 0: the smallest positive float takes its place."""
    from vllm.v1.sample import rejection_sampler

    smallest = torch.finfo(torch.float32).tiny

    def generate_uniform_probs(
        num_tokens: int, num_draft_tokens: list[int], generators: dict[int, torch.Generator], device: torch.device
    ) -> Tensor:
        probabilities = torch.rand(num_tokens, dtype=torch.float32, device=device)
        first = 0
        for request, drafts in enumerate(num_draft_tokens):
            if drafts and request in generators:
                probabilities[first : first + drafts].uniform_(generator=generators[request])
            first += drafts
        return probabilities.clamp_(min=smallest)

    rejection_sampler.generate_uniform_probs = generate_uniform_probs


def replace_compiled_functions() -> None:
    """Takes torch.compile off what would compile in a request: ranks for logprobs, counts of tokens after drafts."""
    from vllm.v1.sample import sampler
    from vllm.v1.spec_decode import utils

    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")  # on the CPU it is imported later, from `utils`
    for module in (sampler, utils, runner):
        for name in ("batched_count_greater_than", "update_num_computed_tokens_for_batch_change"):
            if function := getattr(module, name, None):
                setattr(module, name, getattr(function, "__wrapped__", function))


def replace_expert_routing() -> None:
    """Replaces the default router, which chooses the best experts by a CUDA kernel on every platform."""
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    from torch_gdn_engines.vllm import moe

    fused_topk_router.vllm_topk_softmax = moe.topk_softmax


@cache
def replace_gated_attention() -> None:
    """Qwen3-Next's and Qwen3.5's attention calls eight operators around the attention itself. Wraps it once."""
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    from torch_gdn_engines.vllm import rotary

    Qwen3NextAttention.forward = rotary.gated_attention(Qwen3NextAttention.forward)


@cache
def replace_embedding() -> None:
    """vLLM converts tokens to int64 first, which neither an embedding nor packed rows need. Wraps it once."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    original = VocabParallelEmbedding.forward

    def forward(layer: Any, tokens: Tensor) -> Tensor:
        if layer.tp_size > 1 or tokens.device.type != "mps":  # an engine on the CPU in the same process
            return original(layer, tokens)
        rows: Tensor = layer.quant_method.embedding(layer, tokens)
        return rows

    VocabParallelEmbedding.forward = forward


def replace_grammar_masks() -> None:
    """On mps, xgrammar compiles a function that applies masks with Inductor at the first request. This uses its PyTorch
    one."""
    from vllm.v1.structured_output import utils

    def apply_token_bitmask_inplace(logits: Tensor, bitmask: Tensor, indices: Any = None) -> None:
        from xgrammar import apply_token_bitmask_inplace  # takes a while to import

        apply_token_bitmask_inplace(logits, bitmask, indices=indices, backend="torch_native")

    utils.xgr = SimpleNamespace(apply_token_bitmask_inplace=apply_token_bitmask_inplace)


def replace_triton_allocator() -> None:
    """Lets OLMo-Hybrid's layer set Triton's allocator without Triton, which its constructor does in any case."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
    from vllm.triton_utils import HAS_TRITON

    def set_triton_allocator(device: torch.device) -> None: ...

    if not HAS_TRITON:
        olmo_gdn_linear_attn.set_triton_allocator = set_triton_allocator


def replace_state_copies() -> None:
    """Aligned prefix caching moves states between blocks. vLLM does it by addresses, which on mps are handles of
    buffers, and its CPU platform has no kernels for it together with drafts."""
    from vllm.v1.worker import mamba_utils

    from torch_gdn_engines.vllm import state_copies

    mamba_utils.collect_mamba_copy_meta = state_copies.collect
    mamba_utils.do_mamba_copy_block = state_copies.copy_collected
    context = mamba_utils.MambaSpecDecodeGPUContext
    context.initialize_from_forward_context = state_copies.initialize
    context.run_fused_precopy = state_copies.copy_before_step
    context.run_fused_postprocess = state_copies.copy_after_step


def replace_cpu_preparation() -> None:
    """Prepares vLLM's CPU platform before a worker is made, once for all engines of a process.

    Two faults of vLLM's are corrected. Its `expand` writes to a copy, so that requests with drafts are sampled at
    uninitialised temperatures. Its runner fails at seeds (`seeds`).
    """
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.register_triton_kernel_overrides

    @cache
    def register_triton_kernel_overrides() -> None:
        from vllm.utils import cpu_triton_utils

        from torch_gdn_engines.vllm import kernels, ring_buffers, seeds

        cpu_triton_utils._expand_kernel_impl = kernels.expand
        replace_compiled_functions()
        theirs()
        from vllm.v1.worker import cpu_worker  # not before: it replaces parts of torch for the whole process

        bases = (seeds.KeepsSeeds, ring_buffers.KeepsExactRows, cpu_worker.CPUModelRunner)
        cpu_worker.CPUModelRunner = type("CPUModelRunner", bases, {})

    CpuPlatform.register_triton_kernel_overrides = staticmethod(register_triton_kernel_overrides)


def replace_cpu_lora() -> None:
    """Fixes vLLM 0.32's CPU platform, which gives requests without an adapter the last adapter in a mixed batch."""
    from vllm.platforms.cpu import CpuPlatform

    def get_punica_wrapper(cls: Any) -> str:
        return "torch_gdn_engines.vllm.lora.TorchGdnPunicaWrapper"

    CpuPlatform.get_punica_wrapper = classmethod(get_punica_wrapper)


def replace_registry_scan() -> None:
    """vLLM's registry of kernels looks for "kernel" in the `__dict__` of every object in every module. llvmlite, which
    n-gram drafts import, has an object that makes up a `__dict__` without `get`: no later engine would start."""
    from vllm.triton_utils import dispatcher

    def attributes(value: Any) -> Mapping[str, Any]:
        result = vars(value)
        return result if isinstance(result, Mapping) else {}

    dispatcher.vars = attributes


def replace_backend_cache() -> None:
    """vLLM caches attention backends by a key without additional_config, so that an engine would compute with the AURA
    scheme of an earlier one. A backend is chosen once per layer, when the model is built: it needs no cache."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend = selector._cached_get_attn_backend.__wrapped__


def replace_cpu_attention() -> None:
    """vLLM's CPU platform names one attention backend; with codes it is ours, else it stays vLLM's. It forgets the size
    of a hybrid's blocks: vLLM's scheduler would end parts of prompts elsewhere, and cache states as those of a block.
    """
    from vllm.platforms.cpu import CpuPlatform

    from torch_gdn_engines.vllm import aura_attention, kv_cache_dtype

    their_backend = CpuPlatform.get_attn_backend_cls.__func__
    their_check = CpuPlatform.check_and_update_config.__func__

    def get_attn_backend_cls(cls: Any, *args: Any, **kwargs: Any) -> str:
        return aura_attention.backend_path() if aura_attention.aura_scheme() else their_backend(cls, *args, **kwargs)

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        kv_cache_dtype.move_to_additional_config(vllm_config)
        cache = vllm_config.cache_config
        size = cache.block_size
        their_check(cls, vllm_config)
        if cache.num_gpu_blocks is not None:  # vLLM's EngineCore calls this again when the pools exist
            cache.block_size = size

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
