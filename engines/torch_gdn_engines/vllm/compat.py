"""Holds all run-time replacements in vLLM, and in torch for vLLM, in one place.

Checked with the versions in `versions`, model runner V1. The other modules register what vLLM has registries for
(platform, layers, attention, Triton kernels). Four functions say what is replaced: on each platform, on vLLM's CPU
platform, on mps, and in a worker on mps. What wraps a function of vLLM's gets it as its first argument.
"""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor

import torch_gdn
from torch_gdn.distributed import SCHEME

MESSAGE_POLL = 1000  # milliseconds
LAYERS = "vllm.model_executor.layers."
CPU = "vllm.platforms.cpu.CpuPlatform."
WORKER = "vllm.v1.worker."


def replace(table: Mapping[str, Any]) -> None:
    """Gives each name of a module or a class its new value."""
    for target, value in table.items():
        owner, _, name = target.rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, value)


def wrap(table: Mapping[str, Callable[..., Any]]) -> None:
    """Wraps each function or method, and only once if several engines start in one process."""
    for target, wrapper in table.items():
        owner, _, name = target.rpartition(".")
        held = inspect.getattr_static(pkgutil.resolve_name(owner), name)
        if isinstance(held, staticmethod | property):
            raise TypeError(f"{target}: expected a function or a class method, got a {type(held).__name__}")
        theirs = getattr(held, "__func__", held)
        if getattr(theirs, "wrapper", None) is not wrapper:
            call = wrapped(theirs, wrapper)
            replace({target: classmethod(call) if isinstance(held, classmethod) else call})


def wrapped(theirs: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(theirs, *args, **kwargs)

    call.wrapper = wrapper  # type: ignore[attr-defined]
    return call


class View:
    """Shows a module with other values for some of its names."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


# ---- on each platform ------------------------------------------------------------------------------------------------


def replace_on_each_platform() -> None:
    """Aligned prefix caching moves states between blocks. vLLM does it by addresses, which on mps are handles of
    buffers, and its CPU platform has no kernels for it together with drafts.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention import selector

    from torch_gdn_engines.vllm import state_copies

    context = WORKER + "mamba_utils.MambaSpecDecodeGPUContext."
    backend = "vllm.v1.attention.selector._cached_get_attn_backend"
    replace(
        {
            WORKER + "mamba_utils.collect_mamba_copy_meta": state_copies.collect,
            WORKER + "mamba_utils.do_mamba_copy_block": state_copies.copy_collected,
            context + "initialize_from_forward_context": state_copies.initialize,
            context + "run_fused_precopy": state_copies.copy_before_step,
            context + "run_fused_postprocess": state_copies.copy_after_step,
            # vLLM caches backends by a key without additional_config, so that an engine would compute with the AURA
            # scheme of an earlier one. A backend is chosen once per layer, when the model is built: it needs no cache.
            backend: selector._cached_get_attn_backend.__wrapped__,
            "vllm.triton_utils.dispatcher.vars": attributes,
        }
    )
    if not HAS_TRITON:  # OLMo-Hybrid's constructor sets Triton's allocator in any case
        replace({LAYERS + "mamba.gdn.olmo_gdn_linear_attn.set_triton_allocator": lambda device: None})


def attributes(value: Any) -> Mapping[str, Any]:
    """vLLM's registry of kernels looks for "kernel" in the `__dict__` of every object in every module. llvmlite, which
    n-gram drafts import, has an object that makes up a `__dict__` without `get`: no later engine would start."""
    result = vars(value)
    return result if isinstance(result, Mapping) else {}


# ---- on vLLM's CPU platform ------------------------------------------------------------------------------------------


def replace_on_cpu() -> None:
    """vLLM 0.32's own wrapper of LoRA gives requests without an adapter the last adapter in a mixed batch."""
    wrap(
        {
            CPU + "register_triton_kernel_overrides": prepare_cpu,
            CPU + "get_attn_backend_cls": attention_on_cpu,
            CPU + "check_and_update_config": with_the_size_of_blocks,
            CPU + "get_punica_wrapper": lambda *_: "torch_gdn_engines.vllm.lora.TorchGdnPunicaWrapper",
        }
    )


@functools.cache
def prepare_cpu(theirs: Callable[..., None], cls: Any) -> None:
    """Prepares vLLM's CPU platform before a worker is made, once for all engines of a process.

    Two faults of vLLM's are corrected. Its `expand` writes to a copy, so that requests with drafts are sampled at
    uninitialised temperatures. Its runner fails at seeds (`seeds`).
    """
    from vllm.utils import cpu_triton_utils

    from torch_gdn_engines.vllm import kernels, ring_buffers, seeds

    cpu_triton_utils._expand_kernel_impl = kernels.expand
    replace_compiled_functions()
    theirs(cls)
    from vllm.v1.worker import cpu_worker  # not before: it replaces parts of torch for the whole process

    bases = (seeds.KeepsSeeds, ring_buffers.KeepsExactRows, cpu_worker.CPUModelRunner)
    cpu_worker.CPUModelRunner = type("CPUModelRunner", bases, {})


def attention_on_cpu(theirs: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    """vLLM's CPU platform names one attention backend. With codes it is ours."""
    from torch_gdn_engines.vllm import aura_attention

    return aura_attention.backend_path() if aura_attention.aura_scheme() else theirs(*args, **kwargs)


def with_the_size_of_blocks(theirs: Callable[..., None], cls: Any, vllm_config: Any) -> None:
    """vLLM's CPU platform forgets the size of a hybrid's blocks. Its scheduler would end parts of prompts elsewhere,
    and cache states as those of a block.
    """
    from torch_gdn_engines.vllm import kv_cache_dtype

    kv_cache_dtype.move_to_additional_config(vllm_config)
    cache = vllm_config.cache_config
    size = cache.block_size
    theirs(cls, vllm_config)
    if cache.num_gpu_blocks is not None:  # vLLM's EngineCore calls this again when the pools exist
        cache.block_size = size


# ---- on mps ----------------------------------------------------------------------------------------------------------


def replace_on_mps() -> None:
    queue = "vllm.distributed.device_communicators.shm_broadcast.MessageQueue."
    wrap(
        {
            queue + "dequeue": dequeue_or_end,
            queue + "wait_until_ready": wait_until_ready_or_end,
            "vllm.v1.executor.multiproc_executor.MultiprocExecutor.start_worker_monitor": kill_stopped_workers,
            "vllm.engine.arg_utils.EngineArgs.get_batch_defaults": same_batch_defaults,
        }
    )


def poll(queue: Any) -> Any:
    """Waits for a message. A shutdown of vLLM interrupts its waits for another machine, which ask this."""
    ready = queue.remote_socket.poll(MESSAGE_POLL)
    if not ready and queue.shutting_down:
        raise RuntimeError("a process of this engine has ended")
    return ready


def dequeue_or_end(
    theirs: Callable[..., Any], queue: Any, timeout: float | None = None, indefinite: bool = False
) -> Any:
    end = time.monotonic() + (math.inf if timeout is None else timeout)
    while queue._is_remote_reader and not poll(queue) and time.monotonic() < end:
        pass
    return theirs(queue, None if timeout is None else max(0.0, end - time.monotonic()), indefinite)


def wait_until_ready_or_end(theirs: Callable[..., None], queue: Any) -> None:
    remote = queue.remote_socket

    def recv() -> bytes:
        while not poll(queue):
            pass
        return remote.recv()

    queue.remote_socket = View(remote, recv=recv)
    try:
        theirs(queue)
    finally:
        queue.remote_socket = remote


def kill_stopped_workers(theirs: Callable[..., None], executor: Any, inline: bool = False) -> None:
    """Lets the process that starts workers kill one that is stopped. vLLM would wait for its end."""
    from torch_gdn_engines.vllm.ends import kill_stopped

    workers = [psutil.Process(worker.proc.pid) for worker in executor.workers]
    threading.Thread(target=kill_stopped, args=(workers,), daemon=True).start()
    theirs(executor, inline)


def same_batch_defaults(theirs: Callable[..., Any], cls: Any, world_size: int) -> Any:
    """Gives machines that share a model the same default sizes of a step. vLLM's depend on the machine's memory, and a
    worker makes its buffers by its own machine's."""
    from vllm.engine import arg_utils

    platform = arg_utils.current_platform
    if world_size > 1:
        arg_utils.current_platform = View(platform, get_device_total_memory=lambda: 0)
    try:
        return theirs(cls, world_size)
    finally:
        arg_utils.current_platform = platform


# ---- in a worker on mps ----------------------------------------------------------------------------------------------


def replace_in_worker() -> None:
    from torch_gdn_engines.vllm import moe, rotary
    from torch_gdn_engines.vllm.model_runner import JoinedBlockTables

    replace(
        {
            **streams(),
            # torch has no host allocator for mps, and its empty_host_cache() crashes; vLLM calls it at exit.
            "torch.accelerator.empty_host_cache": lambda: None,
            "torch.accelerator.empty_cache": torch.mps.empty_cache,
            "torch.accelerator.synchronize": lambda device=None: torch.mps.synchronize(),
            "vllm.v1.sample.rejection_sampler.generate_uniform_probs": uniform_probabilities,
            # vLLM's default router chooses the best experts by a CUDA kernel on every platform.
            LAYERS + "fused_moe.router.fused_topk_router.vllm_topk_softmax": moe.topk_softmax,
            "vllm.v1.structured_output.utils.xgr": SimpleNamespace(apply_token_bitmask_inplace=mask_tokens),
            "vllm.v1.utils.CpuGpuBuffer.copy_to_gpu": copy_to_gpu,
            WORKER + "gpu_input_batch.MultiGroupBlockTable": JoinedBlockTables,
            # vLLM prepares each step with a prompt for its Triton convolution: six copies to the device, which nothing
            # here reads.
            "vllm.v1.attention.backends.gdn_attn.compute_causal_conv1d_metadata": lambda *_, **__: (None, None, None),
            "vllm.distributed.parallel_state.get_distributed_init_method": rendezvous,
        }
    )
    replace_compiled_functions()
    wrap(
        {
            "vllm.model_executor.models.qwen3_next.Qwen3NextAttention.forward": rotary.gated_attention,
            LAYERS + "vocab_parallel_embedding.VocabParallelEmbedding.forward": embedding,
        }
    )


def check_before_groups(check: Callable[[], None]) -> None:
    """Runs `check` when all processes are there, before vLLM makes groups of them: groups that differ never start."""

    def make_groups(theirs: Callable[..., None], *args: Any) -> None:
        check()
        theirs(*args)

    wrap({WORKER + "gpu_worker.ensure_model_parallel_initialized": make_groups})


def on_one_address(init_method: str) -> str:
    """Returns the rendezvous with torch_gdn's scheme: its first process listens on the address alone."""
    return init_method.replace("tcp://", f"{SCHEME}://", 1) if init_method.startswith("tcp://") else init_method


def rendezvous(ip: str, port: int) -> str:
    """Replaces what vLLM's launch over several machines calls."""
    from vllm.utils.network_utils import get_distributed_init_method

    return on_one_address(get_distributed_init_method(ip, port))


def uniform_probabilities(
    num_tokens: int, num_draft_tokens: list[int], generators: dict[int, torch.Generator], device: torch.device
) -> Tensor:
    """Rejection sampling draws float64, which mps does not have. A float32 draw of 0 would accept a draft of
    probability 0: the smallest positive float takes its place."""
    probabilities = torch.rand(num_tokens, dtype=torch.float32, device=device)
    first = 0
    for request, drafts in enumerate(num_draft_tokens):
        if drafts and request in generators:
            probabilities[first : first + drafts].uniform_(generator=generators[request])
        first += drafts
    return probabilities.clamp_(min=torch.finfo(torch.float32).tiny)


def copy_to_gpu(buffer: Any, n: int | None = None) -> Tensor:
    """Copies a small array, about ten per step. PyTorch's copy ends the stream's encoder each time."""
    gpu: Tensor = buffer.gpu[:n]
    torch_gdn.copy_from_host_(gpu, buffer.cpu[:n])
    return gpu


def mask_tokens(logits: Tensor, bitmask: Tensor, indices: Any = None) -> None:
    """On mps, xgrammar compiles a function that applies masks with Inductor at the first request. This uses its PyTorch
    one."""
    from xgrammar import apply_token_bitmask_inplace  # takes a while to import

    apply_token_bitmask_inplace(logits, bitmask, indices=indices, backend="torch_native")


def embedding(theirs: Callable[..., Tensor], layer: Any, tokens: Tensor) -> Tensor:
    """vLLM converts tokens to int64 first, which neither an embedding nor packed rows need."""
    if layer.tp_size > 1 or tokens.device.type != "mps":  # an engine on the CPU in the same process
        return theirs(layer, tokens)
    rows: Tensor = layer.quant_method.embedding(layer, tokens)
    return rows


def replace_compiled_functions() -> None:
    """Takes torch.compile off what would compile in a request: ranks for logprobs, counts of tokens after drafts."""
    from vllm.v1.sample import sampler
    from vllm.v1.spec_decode import utils

    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")  # on the CPU it is imported later, from `utils`
    for module in (sampler, utils, runner):
        for name in ("batched_count_greater_than", "update_num_computed_tokens_for_batch_change"):
            if function := getattr(module, name, None):
                setattr(module, name, getattr(function, "__wrapped__", function))


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


def streams() -> dict[str, View]:
    """Returns what the two vLLM modules that use streams see of torch. The rest of the process keeps torch's."""
    cuda = View(torch.cuda, Event=Event, Stream=Stream, current_stream=Stream, stream=lambda stream: stream)
    view = View(torch, Event=Event, cuda=cuda)
    return {WORKER + "gpu_model_runner.torch": view, "vllm.v1.spec_decode.ngram_proposer_gpu.torch": view}
