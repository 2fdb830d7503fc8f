"""Tests that a call with arguments or a grid that Metal rejects is a fault."""

from __future__ import annotations

from typing import Any

import torch

from mps_simulator import metal
from scale_kernel import N, encode_scale, faults, ramp, set_scale


def test_nil_pipeline() -> None:
    with metal.encoder() as encoder, faults("must not be nil"):
        encoder.set_pipeline(None)
    with faults("must not be nil"):
        metal.pipeline_of_nothing()


def test_a_dispatch_without_a_pipeline() -> None:
    with metal.encoder() as encoder, faults("without setComputePipelineState"):
        encoder.dispatch_threads(1, 1)


def test_the_pipeline_of_an_earlier_op_is_not_this_ones(scale: Any) -> None:
    with metal.encoder() as encoder:
        encoder.set_pipeline(scale)
    with metal.encoder() as encoder, faults("without setComputePipelineState"):
        encoder.dispatch_threads(1, 1)


def test_the_arguments_of_an_earlier_op_are_not_this_ones(scale: Any) -> None:
    x, y = ramp(), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        encode_scale(encoder, scale, x, y)
    with metal.encoder() as encoder:
        encoder.set_pipeline(scale)
        encoder.set_buffer(y, 1)
        encoder.set_bytes(N, 2)
        with faults("'x'"):
            encoder.dispatch_threadgroups(2, 32)


def test_a_nil_buffer_is_an_absent_argument(scale: Any) -> None:
    x, y = ramp(), torch.empty(N, device="mps")
    with metal.encoder() as encoder:
        set_scale(encoder, scale, x, y)
        encoder.set_buffer(None, 0)
        with faults("'x'"):
            encoder.dispatch_threadgroups(2, 32)


def test_more_than_4_kilobytes_of_bytes() -> None:
    with metal.encoder() as encoder:
        encoder.set_bytes(bytes(4096), 0)
        with faults("4096 is the most"):
            encoder.set_bytes(bytes(4097), 0)


def test_index_above_30() -> None:
    x = ramp()
    with metal.encoder() as encoder:
        encoder.set_buffer(x, 30)
        for call in (
            lambda: encoder.set_buffer(x, 31),
            lambda: encoder.set_bytes(1, 31),
            lambda: encoder.set_threadgroup_memory(16, 31),
        ):
            with faults("the highest is 30"):
                call()


def test_offset_past_the_end() -> None:
    x = ramp()
    with metal.encoder() as encoder:
        encoder.set_buffer(x, 0, offset=4 * N)
        with faults("past the end"):
            encoder.set_buffer(x, 0, offset=4 * N + 1)


def test_blit_past_the_end() -> None:
    x, y = metal.Buffer(16), metal.Buffer(16)
    blit = metal.CommandQueue().command_buffer().blit_encoder()
    with faults("pass the end"):
        blit.copy(x, 8, y, 0, 9)
    with faults("pass the end"):
        blit.fill(y, 17, 0, 0)
    blit.end_encoding()


def test_a_buffer_of_no_bytes() -> None:
    with faults("more than 0 bytes"):
        metal.Buffer(0)
