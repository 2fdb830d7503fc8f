"""The simulated Metal objects, for tests.

    library = mps_simulator.metal.Library(source)
    pipeline = library.pipeline("scale", constants={0: True})
    with mps_simulator.metal.encoder() as e:
        e.set_pipeline(pipeline)
        e.set_buffer(tensor, 0)
        e.set_bytes(2.0, 1)
        e.dispatch_threads((tensor.numel(), 1, 1), (64, 1, 1))

`encoder()` gives the encoder of PyTorch's own stream, on the stream's queue, as an op uses it. No torch op may run
inside the block. Buffer, CommandQueue and stream_encoder() are for code that does what an op should not do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mps_simulator.device import device_module


def Library(
    source: str, language_version: str = "3.1", fast_math: bool = False, macros: Mapping[str, object] | None = None
) -> Any:
    """Compiles a library with `.functions` and `.pipeline(name, constants={index: value})`."""
    major, minor = (int(part) for part in language_version.split("."))
    texts = {name: str(value) for name, value in (macros or {}).items()}
    return device_module().Library(source, major << 16 | minor, fast_math, texts)


@contextmanager
def encoder() -> Iterator[Any]:
    """Yields the encoder of PyTorch's stream, on its queue."""
    device = device_module()
    device.enter_stream()
    try:
        yield device.stream_encoder()
    finally:
        device.leave_stream()


@contextmanager
def stream_queue() -> Iterator[None]:
    """Runs a block on the queue of PyTorch's stream."""
    device_module().enter_stream()
    try:
        yield
    finally:
        device_module().leave_stream()


def __getattr__(name: str) -> Any:
    public = {
        "Buffer", "CommandQueue", "buffer_of", "error_buffer", "pending_commands", "pipeline_of_nothing",
        "stream_command_buffer", "stream_encoder",
    }  # fmt: skip
    if name not in public:
        raise AttributeError(f"mps_simulator.metal has no {name!r}")
    return getattr(device_module(), name)
