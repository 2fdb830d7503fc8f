"""Records FLA's Kimi Delta Attention on a CUDA GPU, and measures FLA's own errors.

python tests/golden/record_kda.py record FOLDER [CASE ...]    on the GPU; needs fla-core, triton, einops, safetensors
python tests/golden/record_kda.py index FOLDER                anywhere; writes FOLDER/index.json from FOLDER's tensors

FLA's autotuner chooses by timing, so that two recordings would differ: each kernel has its first configuration alone,
and all of them in a case that fails so.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

FUNCTIONS = {"chunk": "chunk_kda", "recurrent": "fused_recurrent_kda"}


@dataclass(frozen=True)
class Shape:
    """A case of the index. An option that is None, False or 0 is off."""

    name: str
    seed: int
    T: int
    B: int = 1
    H: int = 1
    HV: int = 1
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    cu_seqlens: tuple[int, ...] = ()
    initial_state: bool = False
    gates: str = "mild"  # mild, strong (down to -20), or raw projections
    repeated_keys: bool = False
    lower_bound: float | None = None
    raw: bool = False  # the kernel normalises q and k, and beta is a logit
    functions: tuple[str, ...] = ("chunk", "recurrent")

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options that both functions take, without chunk_kda's safe_gate."""
        gate = {"use_gate_in_kernel": True, "lower_bound": self.lower_bound} if self.gates == "raw" else {}
        return gate | ({"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True} if self.raw else {})


SHAPES = [
    Shape("base_k128", 2000, 128),
    Shape("varlen_k128", 2001, 150, cu_seqlens=(0, 17, 150), initial_state=True, functions=("chunk",)),
    Shape("grouped_k64", 2002, 130, HV=2, K=64, V=64, initial_state=True),
    Shape("strong_gate", 2003, 96, gates="strong", functions=("chunk",)),
    Shape("same_keys", 2004, 128, K=64, V=64, repeated_keys=True, functions=("chunk",)),
    Shape("safe_gate", 2005, 80, H=2, HV=2, gates="raw", lower_bound=-5.0),
    Shape("raw_inputs", 2006, 128, H=2, HV=2, K=64, V=64, gates="raw", raw=True, functions=("chunk",)),
    Shape("half_k128", 2007, 100, dtype="float16", initial_state=True),
    Shape(
        "decode_b2",
        2008,
        1,
        B=2,
        HV=2,
        V=64,
        initial_state=True,
        gates="raw",
        lower_bound=-5.0,
        functions=("recurrent",),
    ),
]


def inputs(shape: Shape) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(shape.seed)
    dtype = getattr(torch, shape.dtype)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random)

    keys, values = (shape.B, shape.T, shape.H, shape.K), (shape.B, shape.T, shape.HV, shape.V)
    gates, betas = (*values[:3], shape.K), draw(*values[:3])
    q, k = draw(*keys), draw(*keys)
    if shape.repeated_keys:
        k = k[:, :1].expand(keys)
    if not shape.raw:
        q, k, betas = normalize(q, dim=-1), normalize(k, dim=-1), betas.sigmoid()
    tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": draw(*values).to(dtype), "beta": betas}
    if shape.gates == "raw":
        tensors |= {"g": draw(*gates).to(dtype), "A_log": draw(shape.HV) / 2, "dt_bias": draw(shape.HV * shape.K)}
    else:
        drawn = torch.rand(gates, generator=random)
        tensors["g"] = -20 * drawn if shape.gates == "strong" else logsigmoid(3 * drawn + 1)
    if shape.initial_state:
        tensors["initial_state"] = draw(max(shape.B, len(shape.cu_seqlens) - 1), shape.HV, shape.K, shape.V)
    if shape.cu_seqlens:
        tensors["cu_seqlens"] = torch.tensor(shape.cu_seqlens)
    return {name: x.contiguous() for name, x in tensors.items()}


def autotuners() -> list[Any]:
    """Returns the autotuners of all imported FLA kernels, which heuristics may wrap."""
    result = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for kernel in list(vars(module).values()):
                while kernel is not None and not isinstance(getattr(kernel, "configs", None), list):
                    kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith("triton") else None
                if kernel is not None:
                    result[id(kernel)] = kernel
    return list(result.values())


def outputs(shape: Shape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    functions = importlib.import_module("fla.ops.kda")
    on_device = {name: x.cuda() for name, x in tensors.items()}
    result: dict[str, Tensor] = {}
    for prefix in shape.functions:
        safe = {"safe_gate": True} if prefix == "chunk" and shape.lower_bound is not None else {}
        with torch.no_grad():
            o, state = getattr(functions, FUNCTIONS[prefix])(
                **on_device, **shape.options, **safe, output_final_state=True
            )
        result |= {f"{prefix}_o": o, f"{prefix}_final_state": state}
    return {name: x.cpu().contiguous() for name, x in result.items()}


def record(folder: Path, names: list[str]) -> None:
    importlib.import_module("fla.ops.kda")  # so that its kernels can be found
    tuned = {id(each): (each, each.configs) for each in autotuners()}
    for shape in SHAPES:
        if names and shape.name not in names:
            continue
        tensors = inputs(shape)
        for first_alone in (True, False):
            for each, configs in tuned.values():
                each.configs = configs[:1] if first_alone else configs
            try:
                results = outputs(shape, tensors)
            except Exception:
                print(f"{shape.name}: failed\n{traceback.format_exc()[-3000:]}", flush=True)
                continue
            save_file(tensors | results, folder / f"{shape.name}.safetensors")
            finite = all(x.isfinite().all() for x in results.values())
            print(f"{shape.name}: recorded, {'finite' if finite else 'NOT FINITE'}", flush=True)
            break


def errors(shape: Shape, tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Returns FLA's errors, for each tensor and each head, against the float64 recurrence on the recorded inputs."""
    from torch_gdn import reference
    from torch_gdn_check.registry.bounds import head_errors, relative_error

    given = {name: tensors[name] for name in inputs(shape)}
    wide: dict[str, Any] = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    o, state = reference.fused_recurrent_kda(**wide, **shape.options, output_final_state=True)
    assert state is not None
    result: dict[str, dict[str, Any]] = {"fla_error": {}, "fla_head_errors": {}}
    for prefix in shape.functions:
        for tensor, exact, head_dim in ((f"{prefix}_o", o, 2), (f"{prefix}_final_state", state, 1)):
            theirs = tensors[tensor].double()
            result["fla_error"][tensor] = float(f"{relative_error(theirs, exact):.4g}")
            result["fla_head_errors"][tensor] = [float(f"{x:.4g}") for x in head_errors(theirs, exact, head_dim)]
    return result


def index(folder: Path) -> None:
    rows = []
    for shape in SHAPES:
        if (folder / f"{shape.name}.safetensors").is_file():
            differing = {name: x for name, x in asdict(shape).items() if x not in (None, False, ())}
            tensors = load_file(folder / f"{shape.name}.safetensors")
            rows.append(differing | {"options": shape.options} | errors(shape, tensors))
    (folder / "index.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(Path(sys.argv[2]), sys.argv[3:])
    else:
        index(Path(sys.argv[2]))
