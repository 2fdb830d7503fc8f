"""Tests every op with tensors of more than 2**31 elements, whose offsets need 64 bits.

Linux and the simulated device have memory only for the pages in use. Tensors have 16 bits, because a buffer has at most
8 GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import on_a_mac, ready
from tests.helpers.entries import fields_of
from tests.helpers.errors import assert_same_bits
from tests.helpers.variations import plans, some
from tests.properties.test_optional_inputs_in_pairs import refused
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.gdn import ALGORITHMS, CHUNK, RECURRENT
from torch_gdn_check.registry.inputs import Call, is_floating, tensors_of, to_device
from torch_gdn_check.registry.registry import Named, OpEntry

needs_sparse_memory = pytest.mark.skipif(on_a_mac(), reason="a Mac's memory is not sparse: this would take gigabytes")
pytestmark = needs_sparse_memory
LIMIT_KB = 2 << 20


@contextmanager
def sparse_memory() -> Iterator[None]:
    """Asserts that the body takes less than 2 GiB, and frees the buffers."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_kb("VmRSS")
    yield
    torch.mps.synchronize()
    torch.mps.empty_cache()
    taken = resident_kb("VmHWM") - before
    assert taken < LIMIT_KB, f"{taken} KB more were resident"


def resident_kb(name: str) -> int:
    (kb,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kb)


def far_apart(x: Tensor, device: torch.device) -> Tensor:
    """Returns x on the device with its rows apart, so that they take all of a buffer.

    The second half of rows of 16 bits begins after 2**31 elements, and that of rows of 32 bits after 2**32 bytes.
    """
    row = x[0].numel()
    stride = (2**33 // x.element_size() - row) // (len(x) - 1) // 8 * 8
    whole = torch.empty(stride * (len(x) - 1) + row, dtype=x.dtype, device=device)
    return whole.as_strided(x.shape, (stride, *x[0].contiguous().stride())).copy_(x)


def drawn(entry: OpEntry[Any], point: Any) -> tuple[Any, Call]:
    """Returns the point in bfloat16, and its call with bfloat16 for each other float32 that the op takes as one."""
    has_codes = "key_codes" in entry.arguments
    dtypes = {"dtype", "pool", *(() if has_codes else ("cache",))} & fields_of(entry)
    point = replace(point, **dict.fromkeys(dtypes, torch.bfloat16))
    call = entry.call(point)
    for name in tensors_of(call):
        narrow = call | {name: call[name].to(torch.bfloat16)}
        if call[name].dtype == torch.float32 and not refused(entry, narrow):
            call = narrow
    if "state_indices" in call:
        call["state_indices"][0] = len(call["state_pool"]) - 1
    return point, call


def outputs(entry: OpEntry[Any], point: Any, call: Call) -> Named:
    return entry.outputs(call, entry.run(call, point))


def rows_of(call: Call) -> dict[str, Tensor]:
    """Returns the tensors of several rows of 16 bits, or of 32 if there are none."""
    rows = {name: x for name, x in call.items() if is_floating(x) and x.dim() > 1 and len(x) > 1}
    narrow = {name: x for name, x in rows.items() if x.element_size() == 2}
    return narrow or {name: x for name, x in rows.items() if x.element_size() == 4}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("op", REGISTRY)
def test_rows_far_apart(device: torch.device, op: str) -> None:
    """One tensor at a time has its rows gigabytes apart, inputs and what the op writes."""
    entry = REGISTRY[op]
    for plan in some(plans(op), 2, "far apart", op):
        point, call = drawn(entry, plan)
        near = to_device(call, device)
        expected = {name: x.cpu() for name, x in outputs(entry, point, near).items()}
        for name, x in rows_of(call).items():
            with sparse_memory():
                result = outputs(entry, point, to_device(call, device) | {name: far_apart(x, device)})
                for output, y in result.items():
                    assert_same_bits(f"{output} with {name} far apart", y, expected[output])
                del result, y


OF_RULES: dict[str, Any] = {"K": 16, "V": 64, "H": 1, "HV": 1, "chunk_size": 64, "from_state": False}
LONG: list[tuple[str, dict[str, Any]]] = [
    *((CHUNK, OF_RULES | {"algorithm": each}) for each in ALGORITHMS),
    (RECURRENT, OF_RULES),
    *(("causal_conv1d", {"by_channel": each, "from_state": False}) for each in (False, True)),
    *((op, {}) for op in ("l2norm", "rms_norm_gated")),
]


@pytest.mark.parametrize(
    ("op", "changes"), LONG, ids=lambda each: each if isinstance(each, str) else each.get("algorithm", "")
)
def test_an_output_of_more_elements(op: str, changes: dict[str, Any]) -> None:
    """All rows of the batch are one, which takes no memory. Only the threadgroups of the last row run."""
    import mps_simulator

    entry, device = REGISTRY[op], ready("mps")
    point, call = drawn(entry, replace(entry.small, batch=1, tokens=64, **changes))
    call |= {"output_final_state": False} if "from_state" in fields_of(entry) else {}
    on_device = to_device(call, device)
    expected = next(iter(outputs(entry, point, on_device).values())).cpu()
    rows = 2**31 // expected.numel() + 2
    many = {name: x.expand(rows, *x.shape[1:]) for name, x in on_device.items() if torch.is_tensor(x) and len(x) == 1}
    with sparse_memory():
        torch.mps.synchronize()
        with mps_simulator.settings(parts=rows):
            y = next(iter(outputs(entry, point, on_device | many).values()))
        assert len(y) == rows and y[:-1].numel() > 2**31 and expected.any()
        assert_same_bits(op, y[-1:], expected)
        del y
