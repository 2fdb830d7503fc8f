"""`python -m tests.helpers.allocations` under count_allocations.c writes as JSON what the calls of a decoding step
allocate.

For each op: [allocations of its kernel for `mps` in CALLS calls, allocations of everything else].
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from functools import partial

import torch

import mps_simulator
from torch_gdn import _C
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.layers import decoding_points

METAL = b"libtorch_gdn_metal"
CALLS = 20


def decode_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Returns decode calls in place, with a buffer for the output."""
    for op, point in decoding_points((2, 4, 64, 32), torch.float32, batch=2).items():
        entry = REGISTRY[op]
        call = to_device(entry.call(point), "mps")
        if "out" in entry.written:
            call["out"] = entry.run(call).clone()
        yield op, partial(entry.overload, **call)


def main() -> None:
    mps_simulator.activate()
    counter, result = ctypes.CDLL(None), {}
    for name, call in decode_calls():
        call()  # to compile
        for library in (METAL, _C.__name__.rpartition(".")[2].encode()):
            counter.begin_counting(library)
            for _ in range(CALLS):
                call()
            own = counter.end_counting()
            result[f"{name} {library.decode()}"] = [own, counter.allocations_of_others()]
        torch.mps.synchronize()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
