"""Tests that what a Mac's Metal rejects or leaves undefined is a fault of the simulated objects, and its right twin
runs.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

import mps_simulator
from mps_simulator import metal
from scale_kernel import N, doubled, encode_scale, faults, ramp, scaled

SOURCE = """
#include <metal_stdlib>
using namespace metal;

struct ErrorMessage { char file[128]; char func[128]; char message[250]; uint line; };
struct ErrorMessages { atomic_uint count; ErrorMessage msg[30]; };

kernel void report(device ErrorMessages* errors [[buffer(0)]]) {
  atomic_fetch_add_explicit(&errors->count, 1, memory_order_relaxed);
  device ErrorMessage& first = errors->msg[0];
  first.file[0] = 'f'; first.file[1] = 0;
  first.func[0] = 'k'; first.func[1] = 0;
  first.message[0] = 'b'; first.message[1] = 'a'; first.message[2] = 'd'; first.message[3] = 0;
  first.line = 7;
}
"""


@pytest.fixture(scope="module")
def library() -> Any:
    return metal.Library(SOURCE)


# ---- the right way ----


def test_an_op_encodes_on_the_streams_encoder(scale: Any) -> None:
    x, y = ramp(), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    assert y.tolist() == doubled()


def test_a_tensor_is_bound_at_its_storage_offset(scale: Any) -> None:
    x, y = ramp(), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x[8:], y, count=N - 8)
    assert y[: N - 8].tolist() == doubled()[8:]


def test_pipeline_facts(scale: Any) -> None:
    assert (scale.name, scale.max_total_threads_per_threadgroup, scale.thread_execution_width) == ("scale", 1024, 32)


def test_an_unknown_function_is_named(library: Any) -> None:
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        library.pipeline("no_such_kernel")


@pytest.mark.parametrize("is_released", [False, True])
def test_an_own_queue_retains_the_buffers_that_are_bound(scale: Any, is_released: bool) -> None:
    x, y = metal.Buffer(4 * N), metal.Buffer(4 * N)
    x.write(struct.pack(f"{N}f", *range(N)))
    command_buffer = scaled(scale, x, y)
    if is_released:
        x.release()
    command_buffer.commit()
    command_buffer.wait()
    assert list(struct.unpack(f"{N}f", y.read())) == doubled()


def test_blit_encoder_copies_and_fills() -> None:
    x, y = metal.Buffer(16), metal.Buffer(16)
    x.write(bytes(range(16)))
    command_buffer = metal.CommandQueue().command_buffer()
    blit = command_buffer.blit_encoder()
    blit.fill(y, 0, 16, 7)
    blit.copy(x, 4, y, 8, 4)
    blit.end_encoding()
    command_buffer.commit()
    command_buffer.wait()
    assert y.read() == bytes([7] * 8 + [4, 5, 6, 7] + [7] * 4)


# ---- command buffers run when they are waited for ----


def test_commands_do_not_run_when_encoded(scale: Any) -> None:
    torch.mps.synchronize()
    x, y = ramp(), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    assert metal.pending_commands() == 1
    torch.mps.synchronize()
    assert metal.pending_commands() == 0


def test_commands_run_at_commit_if_so_set(scale: Any, settings: Any) -> None:
    settings.run_at = "commit"
    x, y = ramp(), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    assert metal.pending_commands() == 1
    with metal.stream_queue():
        pass
    torch.mps.Event().record()
    assert metal.pending_commands() == 0
    assert y.tolist() == doubled()


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_concurrent_encoder_orders_dispatches_at_barriers_only(scale: Any, settings: Any, is_ordered: bool) -> None:
    x, y, z = ramp(), torch.zeros(N, device="mps"), torch.zeros(N, device="mps")
    settings.encoder = "concurrent"
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
        if is_ordered:
            encoder.memory_barrier()
        encode_scale(encoder, scale, y, z)
    assert y.tolist() == doubled()
    assert z.tolist() == [2 * each if is_ordered else 0 for each in doubled()]


def test_unretained_references_to_a_dead_buffer(scale: Any) -> None:
    x, y = metal.Buffer(4 * N), metal.Buffer(4 * N)
    x.write(bytes(4 * N))
    command_buffer = scaled(scale, x, y, retained=False)
    x.release()
    command_buffer.commit()
    with faults("deallocated MTLBuffer"):
        command_buffer.wait()


def test_an_own_queue_is_not_ordered_with_the_stream(scale: Any) -> None:
    x, y, z = ramp(), torch.empty(N, device="mps"), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    command_buffer = scaled(scale, y, z)
    command_buffer.commit()
    with faults("scale"):  # it reads what the stream has not yet written
        command_buffer.wait()
    assert y.tolist() == doubled()


# ---- faults while commands run ----


def test_a_fault_drops_its_command_buffer_and_leaves_the_stream_usable(scale: Any) -> None:
    x, y, z = ramp(), torch.empty(N, device="mps"), torch.empty(N, device="mps")
    torch.mps.synchronize()
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y, count=N + 1)
        encode_scale(encoder, scale, x, z)
    with faults("kernel 'scale'"):
        torch.mps.synchronize()
    assert metal.pending_commands() == 0
    assert z.isnan().all()
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, z)
    assert z.tolist() == doubled()


def test_a_failed_command_buffer_has_a_status_and_an_error(scale: Any) -> None:
    x, y = metal.Buffer(4 * N), metal.Buffer(4 * N)
    command_buffer = scaled(scale, x, y)  # nothing has written x
    command_buffer.commit()
    with faults("kernel 'scale'"):
        command_buffer.wait()
    assert command_buffer.status == 5
    assert "kernel 'scale'" in command_buffer.error


def test_every_way_to_wait_reports_the_fault(scale: Any) -> None:
    x, y = ramp(), torch.empty(N, device="mps")
    for wait in (y.cpu, y.tolist, lambda: y[0].item(), lambda: y + 1, torch.mps.synchronize, torch.mps.empty_cache):
        with metal.encoder() as encoder:
            encode_scale(encoder, scale, x, y, count=N + 1)
        with faults("kernel 'scale'"):
            wait()


def test_a_reported_error_is_raised_at_the_next_wait(library: Any) -> None:
    errors = metal.error_buffer()
    with metal.encoder() as encoder:
        encoder.set_pipeline(library.pipeline("report"))
        encoder.set_buffer(errors, 0)
        encoder.dispatch_threads(1, 1)
    with pytest.raises(torch.AcceleratorError, match=r"bad.*k"):
        torch.mps.synchronize()
    torch.mps.synchronize()  # the error is reported only once


# ---- the host and pending work ----


def test_contents_of_a_busy_buffer(scale: Any) -> None:
    x, y = metal.Buffer(4 * N), metal.Buffer(4 * N)
    x.write(bytes(4 * N))
    command_buffer = scaled(scale, x, y)
    with faults("command buffer uses which has not completed"):
        y.read()
    command_buffer.commit()
    with faults("command buffer uses which has not completed"):
        x.write(b"new")
    command_buffer.wait()
    assert y.read() == bytes(4 * N)


def test_contents_of_a_tensor_with_pending_work(scale: Any) -> None:
    x, y = ramp(), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    buffer = metal.buffer_of(y)
    with faults("command buffer uses which has not completed"):
        buffer.read()
    torch.mps.synchronize()
    assert list(struct.unpack(f"{N}f", buffer.read())) == doubled()


def test_a_recycled_block_is_read_before_it_is_written(scale: Any) -> None:
    x, y = torch.ones(N, device="mps"), torch.empty(N, device="mps")
    torch.mps.synchronize()
    block = x.data_ptr()
    del x
    x = torch.empty(N, device="mps")
    assert x.data_ptr() == block
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    with faults("'x'"):
        torch.mps.synchronize()
    x.fill_(1)
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    assert y.tolist() == [2.0] * N


def test_kernels_are_held_to_the_tensors_size_not_the_blocks(scale: Any) -> None:
    x = torch.ones(N, device="mps")
    y = torch.empty(N - 1, device="mps")  # its block has 512 bytes
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    with faults("out of bounds"):
        torch.mps.synchronize()


def test_a_copy_writes_the_bytes_of_its_elements_and_no_others(scale: Any) -> None:
    x, y = torch.empty(N, device="mps"), torch.empty(N, device="mps")
    x[::2].copy_(torch.arange(N // 2))
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    with pytest.raises(mps_simulator.Fault, match=r"'x'.* 1\b"):
        torch.mps.synchronize()
    x[1::2].copy_(torch.arange(N // 2))
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    assert y.tolist() == [2.0 * (i // 2) for i in range(N)]


# ---- misused objects ----


def test_over_released_buffer() -> None:
    buffer = metal.Buffer(64)
    buffer.retain()
    buffer.release()
    buffer.release()
    with faults("over-released"):
        buffer.release()


def test_use_of_a_deallocated_buffer(scale: Any) -> None:
    buffer = metal.Buffer(64)
    buffer.release()
    with faults("deallocated"):
        buffer.read()
    with metal.encoder() as encoder:
        encoder.set_pipeline(scale)
        with faults("not a live MTLBuffer"):
            encoder.set_buffer(buffer, 0)


def test_release_of_a_buffer_that_pytorch_holds() -> None:
    x = ramp()
    buffer = metal.buffer_of(x)
    buffer.release()
    with faults("over-released"):
        buffer.release()
    assert x.tolist() == [float(i) for i in range(N)]


def test_a_cpu_tensor_is_not_a_buffer(scale: Any) -> None:
    with metal.encoder() as encoder:
        encoder.set_pipeline(scale)
        with faults("not a live MTLBuffer"):
            encoder.set_buffer(torch.ones(N), 0)


def test_encoding_off_the_streams_queue(scale: Any) -> None:
    with faults("off the stream's queue"):
        metal.stream_encoder()
    with metal.encoder() as encoder:
        encoder.set_pipeline(scale)
    with faults("off the stream's queue"):
        encoder.set_bytes(1, 0)
    with faults("off the stream's queue"):
        metal.stream_command_buffer().compute_encoder()
    with faults("off the stream's queue"):
        metal.stream_command_buffer().commit()


def test_a_torch_op_inside_a_block_is_a_deadlock() -> None:
    x = ramp()
    with metal.encoder(), faults("deadlock on a Mac"):
        x.cpu()
    assert x.tolist() == [float(i) for i in range(N)]


def test_memory_may_be_allocated_inside_a_block(scale: Any) -> None:
    x = ramp()
    with metal.encoder() as encoder:
        y = torch.empty(N, device="mps")
        encode_scale(encoder, scale, x, y)
    assert y.tolist() == doubled()


def test_encoding_after_end_encoding(scale: Any) -> None:
    encoder = metal.CommandQueue().command_buffer().compute_encoder()
    encoder.set_pipeline(scale)
    encoder.end_encoding()
    for call in (
        lambda: encoder.set_pipeline(scale),
        lambda: encoder.set_bytes(1, 0),
        lambda: encoder.set_buffer(None, 0),
        lambda: encoder.set_threadgroup_memory(16, 0),
        lambda: encoder.dispatch_threads(1, 1),
        lambda: encoder.dispatch_threadgroups(1, 1),
        encoder.memory_barrier,
        encoder.end_encoding,
    ):
        with faults("after endEncoding"):
            call()


def test_an_encoder_kept_past_a_copy_has_ended(scale: Any) -> None:
    with metal.encoder() as encoder:
        encoder.set_pipeline(scale)
    ramp().clone()
    with metal.stream_queue(), faults("after endEncoding"):
        encoder.set_bytes(1, 0)


def test_a_second_encoder_while_one_is_open() -> None:
    command_buffer = metal.CommandQueue().command_buffer()
    encoder = command_buffer.compute_encoder()
    with faults("already encoding"):
        command_buffer.compute_encoder()
    with faults("already encoding"):
        command_buffer.blit_encoder()
    encoder.end_encoding()
    command_buffer.blit_encoder().end_encoding()


def test_an_own_encoder_on_the_streams_command_buffer() -> None:
    ramp().clone()
    with metal.encoder(), faults("already encoding"):
        metal.stream_command_buffer().compute_encoder()


def test_commit_with_an_open_encoder() -> None:
    command_buffer = metal.CommandQueue().command_buffer()
    encoder = command_buffer.compute_encoder()
    with faults("already encoding"):
        command_buffer.commit()
    encoder.end_encoding()
    command_buffer.commit()


@pytest.mark.parametrize("call", ["commit", "compute_encoder"])
def test_a_committed_command_buffer_takes_no(call: str) -> None:
    command_buffer = metal.CommandQueue().command_buffer()
    command_buffer.commit()
    with faults("after the command buffer was committed"):
        getattr(command_buffer, call)()


def test_wait_before_commit() -> None:
    command_buffer = metal.CommandQueue().command_buffer()
    with faults("before commit"):
        command_buffer.wait()


def test_an_encoder_released_while_open() -> None:
    encoder = metal.CommandQueue().command_buffer().compute_encoder()
    with faults("released without endEncoding"):
        encoder.release()
