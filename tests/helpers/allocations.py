"""`python -m tests.helpers.allocations`, under count_allocations.c: JSON of what calls of a step of decoding allocate.

For each op: [allocations of its kernel for `mps` in CALLS calls, allocations of everybody else].
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable

import torch
from torch import Tensor

import mps_simulator
from torch_gdn import _C

METAL = b"libtorch_gdn_metal"
CALLS = 20


def decode_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    def some(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    ops = torch.ops.gdn
    q, v, g = some(2, 1, 2, 64), some(2, 1, 4, 32), -some(2, 1, 4)
    pool, slots = some(3, 4, 64, 32), torch.tensor([2, 0], dtype=torch.int32, device=device)
    columns, weight, taps = some(2, 1, 32), some(32, 4), some(3, 32, 4)
    return {
        "l2norm": lambda: ops.l2norm(q),
        "rms_norm": lambda: ops.rms_norm(v, v[0, 0, 0], v),
        "rms_norm_gated": lambda: ops.rms_norm_gated(v, v, v[0, 0, 0]),
        "gdn_gating": lambda: ops.gdn_gating(g[0, 0], g, g),
        "causal_conv1d_update_": lambda: ops.causal_conv1d_update_(columns, weight, taps, slots, activation="silu"),
        "fused_recurrent_gated_delta_rule": lambda: ops.fused_recurrent_gated_delta_rule(
            q, q, v, g, g, initial_state=pool[:2], output_final_state=True
        ),
        "fused_recurrent_gated_delta_rule_": lambda: ops.fused_recurrent_gated_delta_rule_(
            q, q, v, g, g, pool, slots, out=v.clone()
        ),
    }


def main() -> None:
    mps_simulator.activate()
    counter, found = ctypes.CDLL(None), {}
    for name, call in decode_calls(torch.device("mps")).items():
        call()  # compiles
        for library in (METAL, _C.__name__.rpartition(".")[2].encode()):
            counter.begin_counting(library)
            for _ in range(CALLS):
                call()
            own = counter.end_counting()
            found[f"{name} {library.decode()}"] = [own, counter.allocations_of_others()]
        torch.mps.synchronize()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
