"""Tests that threads compile pipelines at the same time, each pipeline once, and that a launch keeps its pipelines
alive.

The tests replace a shader by a named pipe, so that compiling it blocks until the test writes the shader's text.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.devices import ready
from tests.helpers.errors import assert_same_bits
from tests.helpers.files import copied_shaders
from torch_gdn import _C
from torch_gdn._compiling import compile_variants
from torch_gdn._recorder import KernelVariant
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry.cases import make_case

PATIENCE = 60  # seconds until a test fails

PROBE = """
#include "core/parameters.h"
template <typename T>
[[kernel]] void probe(device T* out [[buffer(0)]]) {
  out[0] = T(0);
}
"""


class Pipe:
    """A named pipe in place of a shader, with PROBE as its text if no shader has that name."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text() if path.exists() else PROBE
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        self._end: int | None = None

    def wait_for_reader(self) -> None:
        for _ in range(PATIENCE * 100):
            try:
                self._end = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
                return
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
            time.sleep(0.01)
        pytest.fail(f"nothing reads {self.path.name}")

    def write(self) -> None:
        assert self._end is not None
        os.write(self._end, self.text.encode())
        self._close()

    def _close(self) -> None:
        if self._end is not None:
            os.close(self._end)
        self._end = None

    def remove(self) -> None:
        """Restores the shader. A thread that still waits reads an empty file."""
        self._close()
        with contextlib.suppress(OSError):
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        self.path.unlink()
        self.path.write_text(self.text)


@pytest.fixture
def shaders(tmp_path: Path) -> Iterator[Path]:
    ready("mps")
    with copied_shaders(tmp_path) as copy:
        yield copy


@contextlib.contextmanager
def pipes_at(*paths: Path) -> Iterator[tuple[list[Pipe], ThreadPoolExecutor]]:
    pipes = [Pipe(path) for path in paths]
    with ThreadPoolExecutor(3) as threads:
        try:
            yield pipes, threads
        finally:
            for pipe in pipes:
                pipe.remove()


def finish(*calls: Future[Any]) -> bool:
    return not wait(calls, timeout=PATIENCE).not_done


def test_threads_compile_at_the_same_time_and_each_variant_once(shaders: Path) -> None:
    with pipes_at(shaders / "one.metal", shaders / "two.metal") as (pipes, threads):
        one, same = (threads.submit(_C.compile, "probe", "one.metal", ["float"]) for _ in range(2))
        two = threads.submit(_C.compile, "probe", "two.metal", ["half"])
        for pipe in pipes:
            pipe.wait_for_reader()
        for pipe in pipes:
            pipe.write()
        assert finish(one, same, two)  # compiling one.metal again would block
    assert one.result() == same.result() and one.result()["name"] == "probe_float"
    assert two.result()["name"] == "probe_half"


def names() -> set[str]:
    return {facts["name"] for facts in _C.pipelines()}


def test_files_are_compiled_at_the_same_time_each_from_one_source(shaders: Path) -> None:
    files = ("one.metal", "two.metal")
    variants = [KernelVariant("probe", file, (T,)) for T in ("float", "half") for file in files]
    variants = [replace(each, kernel=f"probe_{each.file[:3]}") for each in variants]
    counted: list[int] = []
    with pipes_at(*(shaders / file for file in files)) as (pipes, threads):
        for pipe in pipes:
            pipe.text = pipe.text.replace("probe", f"probe_{pipe.path.stem}")
        call = threads.submit(compile_variants, variants, counted.append)
        for pipe in pipes:
            pipe.wait_for_reader()
        for pipe in pipes:
            pipe.write()
        assert finish(call)  # reading a file again would block
    call.result()
    assert names() == {each.name for each in variants}
    assert counted == [2, 2]


def test_a_variant_that_fails_takes_down_no_other(shaders: Path) -> None:
    (shaders / "probe.metal").write_text(PROBE)
    variants = [KernelVariant("probe", "probe.metal", (T,)) for T in ("float", "no_such_type", "half")]
    with pytest.raises(RuntimeError, match=r"could not compile probe_no_such_type: .*no_such_type"):
        compile_variants(variants, lambda count: None)
    assert names() == {"probe_float", "probe_half"}


def test_a_missing_function_is_reported_with_those_that_are_there(shaders: Path) -> None:
    other = 'template [[host_name("other")]] [[kernel]] decltype(probe<float>) probe<float>;'
    (shaders / "probe.metal").write_text(PROBE + other + '\n#define host_name(name) host_name("nameless")\n')
    with pytest.raises(
        RuntimeError, match=r"to have a kernel probe_half, got a library with these functions: other, n"
    ):
        _C.compile("probe", "probe.metal", ["half"])


def test_a_launch_keeps_its_pipelines(shaders: Path) -> None:
    """clear_pipelines runs while the last of the call's three pipelines is compiled."""
    case = make_case(70).to(torch.device("mps"))

    def prefill() -> torch.Tensor:
        with prefill_algorithm("chunked"):
            return torch_gdn.chunk_gated_delta_rule(*case.qkv, **case.options)[0].cpu()

    expected = prefill()
    _C.clear_pipelines()
    with pipes_at(shaders / "gdn" / "chunk_fwd_o.metal") as ((pipe,), threads):
        call = threads.submit(prefill)
        pipe.wait_for_reader()
        assert finish(threads.submit(_C.clear_pipelines))
        pipe.write()
        assert finish(call)
    assert_same_bits("o", call.result(), expected)
