from typing import TypedDict

class PipelineFacts(TypedDict):
    name: str
    warnings: str
    compile_seconds: float
    max_total_threads_per_threadgroup: int
    thread_execution_width: int
    static_threadgroup_memory_length: int

class DeviceFacts(TypedDict):
    name: str
    core_count: int
    max_threadgroup_memory_length: int
    max_buffer_length: int
    recommended_max_working_set_size: int

def has_launcher() -> bool: ...
def compile(kernel: str, file: str, arguments: list[str]) -> PipelineFacts: ...
def pipelines() -> list[PipelineFacts]: ...
def clear_pipelines() -> None: ...
def device_facts() -> DeviceFacts: ...
def set_shader_directory(directory: str) -> None: ...
def shader_directory() -> str: ...
