from collections.abc import Callable
from typing import Any, TypedDict

from torch import Tensor

class PipelineFacts(TypedDict):
    name: str
    warnings: str
    compile_seconds: float
    max_total_threads_per_threadgroup: int
    thread_execution_width: int
    static_threadgroup_memory_length: int

class RecordedLaunch(TypedDict):
    kernel: str
    file: str
    arguments: list[str]
    bindings: int
    threadgroups: list[int]
    threads: int
    overlaps: list[tuple[int, int]]

class Recording:
    def start(self) -> None: ...
    def stop(self) -> list[RecordedLaunch]: ...

class TracedLaunch(TypedDict):
    kernel: str
    file: str
    arguments: list[str]
    bindings: list[Tensor | bytes | None]
    threadgroups: list[int]
    threads: int

class Tracing:
    def __init__(
        self, before: Callable[[TracedLaunch], None], after: Callable[[TracedLaunch], None], runs: bool
    ) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...

class DeviceFacts(TypedDict):
    name: str
    core_count: int
    max_threadgroup_memory_length: int
    max_buffer_length: int
    recommended_max_working_set_size: int
    families: list[str]

built_with_torch: str
built_with_compiler: str
built_with_sdk: int | None

def ops() -> list[str]: ...
def cpu_threads() -> int: ...
def infer_outputs(op: str, *arguments: Any, **keywords: Any) -> Any: ...
def has_launcher() -> bool: ...
def compile(kernel: str, file: str, arguments: list[str]) -> PipelineFacts: ...
def launch(
    kernel: str,
    file: str,
    arguments: list[str],
    bindings: list[Tensor | bytes | str | None],
    threadgroups: list[int],
    threads: int,
) -> None: ...
def pipelines() -> list[PipelineFacts]: ...
def clear_pipelines() -> None: ...
def device_facts() -> DeviceFacts: ...
def shader_source(kernel: str, file: str, arguments: list[str]) -> str: ...
def prefill_algorithms() -> list[str]: ...
def prefill_algorithm(
    tokens: int, heads: int, K: int, V: int, device: str, cores: int, channel_decays: bool = False
) -> tuple[str, int]: ...
def tuning_key(device: str, cores: int) -> str: ...
def set_tuning_cache(table: dict[str, list[tuple[int, int, int, str, int]]]) -> None: ...
def force_prefill_algorithm(algorithm: str | None, chunk_size: int = 0) -> None: ...
def forced_prefill_algorithm() -> tuple[str, int] | None: ...
def fused_chunk_size(K: int, element_bytes: int, wanted: int = 0) -> int: ...
def set_shader_directory(directory: str) -> None: ...
def shader_directory() -> str: ...
