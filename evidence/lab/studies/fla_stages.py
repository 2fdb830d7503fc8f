"""Compares the four ops of the gradients' stages with FLA's kernels of the same names, in Triton's interpreter.

    git clone https://github.com/fla-org/flash-linear-attention fla && git -C fla checkout COMMIT
    pip install --no-deps triton==3.4.0 einops
    python -m evidence.lab.studies.fla_stages fla

COMMIT is that of `fla_tests`. FLA's kernels run unchanged, on the CPU, without tuning. They take the cumulative sum of
the log decays in base 2, and return its gradient where torch_gdn returns that of the log decays. The table has the
distance between the two, relative to the norm of FLA's tensor.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

import torch_gdn
from evidence.lab.studies.fla_tests import check_commit

B, T, H, HV, K, V, CHUNK = 2, 37, 2, 4, 32, 24, 16
PACKAGES = ("fla", "fla.ops", "fla.ops.common", "fla.ops.gated_delta_rule", "fla.ops.utils")


class Index(int):
    """A number of a Python loop. Kernels convert it, which the interpreter's plain numbers cannot do."""

    def to(self, dtype: Any) -> Index:
        return self


def indices(*limits: int) -> Iterator[Index]:
    return map(Index, builtins.range(*limits))


def load(checkout: Path) -> tuple[ModuleType, ModuleType, ModuleType]:
    """Imports the three modules with the stages, without the packages around them, which want a GPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["fla"].__version__ = "0"  # type: ignore[attr-defined]
    index: Any = import_module("fla.ops.utils.index")
    vars(sys.modules["fla.ops.utils"]).update(vars(index))
    tuner: Any = import_module("triton.runtime.autotuner").Autotuner
    run = tuner.run

    def run_the_first(self: Any, *args: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **options)

    tuner.run = run_the_first
    output, state, wy = (
        import_module(f"fla.ops.{name}")
        for name in ("common.chunk_o", "common.chunk_delta_h", "gated_delta_rule.wy_fast")
    )
    state.range = indices  # type: ignore[attr-defined]
    return output, state, wy


def reverse_sum(x: Tensor) -> Tensor:
    """Returns the sum over the tokens from each on, in its chunk."""
    chunks = pad(x.float(), (0, 0, 0, -T % CHUNK)).view(B, -1, CHUNK, HV)
    return chunks.flip(2).cumsum(2).flip(2).reshape(B, -1, HV)[:, :T]


def compare(checkout: Path) -> dict[str, float]:
    output, state, wy = load(checkout)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    v, do, beta = draw(B, T, HV, V), draw(B, T, HV, V), draw(B, T, HV).sigmoid()
    g = torch_gdn.chunk_local_cumsum(-draw(B, T, HV).abs(), CHUNK)
    h0, dht = draw(B, HV, K, V), draw(B, HV, K, V)
    A = torch_gdn.solve_tril(torch_gdn.chunk_scaled_dot_kkt(k, g, beta, chunk_size=CHUNK))
    w, u = torch_gdn.recompute_w_u(k, v, beta, A, g)
    h, v_new, _ = torch_gdn.chunk_fwd_h(k, w, u, g, initial_state=h0, output_final_state=True, chunk_size=CHUNK)
    common: dict[str, Any] = {"g": g / log(2), "scale": K**-0.5, "chunk_size": CHUNK}

    dv = torch_gdn.chunk_bwd_dv_local(q, k, do, g)
    dh, dh0, dv2 = torch_gdn.chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, g, h0=h0, dht=dht)
    dq, dk, dw, dg = torch_gdn.chunk_bwd_dqkwg(q, k, v_new, do, h, dh, dv=dv2, g=g)
    dk_wy, dv_wy, dbeta, dg_wy = torch_gdn.prepare_wy_repr_bwd(k, v, beta, dw, dv2, g)

    fla_dv = output.chunk_bwd_dv_local(q, k, do, **common)
    fla_dh = state.chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, h0=h0, dht=dht, **common)
    fla_dq, fla_dk, fla_dw, fla_dg = output.chunk_bwd_dqkwg(q, k, v_new, do, h, dh, w=w, dv=dv2, **common)
    fla_wy = wy.prepare_wy_repr_bwd(k, v, beta, A, dw, dv2, g=common["g"])
    pairs = {"chunk_bwd_dv_local: dv": (dv, fla_dv)}
    for name, x, expected in zip(("dh", "dh0", "dv2"), (dh, dh0, dv2), fla_dh, strict=True):
        assert x is not None
        pairs[f"chunk_gated_delta_rule_bwd_dhu: {name}"] = x, expected
    for name, x, expected in zip(("dq", "dk", "dw"), (dq, dk, dw), (fla_dq, fla_dk, fla_dw), strict=True):
        pairs[f"chunk_bwd_dqkwg: {name}"] = x, expected
    for name, x, expected in zip(("dk", "dv", "dbeta"), (dk_wy, dv_wy, dbeta), fla_wy[:3], strict=True):
        pairs[f"prepare_wy_repr_bwd: {name}"] = x, expected
    pairs["both: dg"] = dg + dg_wy, reverse_sum(fla_dg) + reverse_sum(fla_wy[3])
    return {name: float((x - y).norm() / y.norm()) for name, (x, y) in pairs.items()}


def main() -> None:
    checkout = Path(sys.argv[1])
    check_commit(checkout)
    print("| op: output | distance from FLA's |\n|---|---|")
    for name, distance in compare(checkout).items():
        print(f"| {name} | {distance:.1e} |")
        assert distance < 4e-7, name


if __name__ == "__main__":
    main()
