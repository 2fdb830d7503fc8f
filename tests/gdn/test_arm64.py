"""Tests prefill by the CPU's kernels for arm64 in an emulator. bf16 uses bfmmla if the processor has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mps_simulator import requirements
from tests.helpers.cases import Case, assert_exact, make_case
from tests.helpers.golden import load
from torch_gdn_check import golden as recorded

CHECKOUT = Path(__file__).parents[2]
EMULATOR = "qemu-aarch64"
SOURCES = ("tests/gdn/arm64_prefill.cpp", "csrc/cpu/simd/chunk.cpp", "csrc/cpu/simd/isa.cpp")
PROCESSORS = {"max": "pairs", "cortex-a72": "floats"}  # the second has no bfmmla
COLUMNS = 32

# Both compilers use the C++ library of the package g++-aarch64-linux-gnu.
COMPILERS = {
    "clang": [requirements.clang(), "--target=aarch64-linux-gnu", "-static"],
    "gcc": ["aarch64-linux-gnu-g++", "-static", "-fopenmp-simd"],
}

pytestmark = [
    pytest.mark.skipif(
        shutil.which(EMULATOR) is None or sys.platform != "linux", reason=f"no {EMULATOR}: apt-get install qemu-user"
    ),
    pytest.mark.sweep(2, of="program", seeds=3),
    pytest.mark.xdist_group("arm64"),  # so that one process builds the program
]


@pytest.fixture(scope="module", params=COMPILERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("no C++ library for arm64: apt-get install g++-aarch64-linux-gnu")
    command = COMPILERS[request.param]
    built = tmp_path_factory.mktemp("arm64") / "prefill"
    include = Path(torch.__file__).parent / "include"
    folders = [f"-I{folder}" for folder in (CHECKOUT, CHECKOUT / "csrc", CHECKOUT / "shaders", include)]
    sources = [str(CHECKOUT / name) for name in SOURCES]
    subprocess.run(
        [*command, "-std=c++20", "-O2", "-Wall", "-Werror", *folders, *sources, "-o", str(built)], check=True
    )
    return built


def prefill(program: Path, case: Case, processor: str, **environment: str) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Returns the kernels that ran, o and the final state."""
    on_device, back = program.parent / "in", program.parent / "out"
    assert case.initial_state is not None
    tokens, K = case.q.size(1), case.q.size(3)
    tensors = (torch.tensor([tokens, K]), *case.qkv, case.g, case.beta, case.initial_state)
    on_device.write_bytes(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors))
    command = [EMULATOR, "-cpu", processor, str(program), str(on_device), str(back)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment).stdout
    o_bytes = 2 * tokens * COLUMNS
    results = bytearray(back.read_bytes())
    o = torch.frombuffer(results[:o_bytes], dtype=torch.bfloat16).view(case.v.shape)
    return result.strip(), o, torch.frombuffer(results[o_bytes:], dtype=torch.float32).view(case.initial_state.shape)


@pytest.mark.parametrize("K", [128, 40, 33])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_prefill_is_exact(program: Path, processor: str, K: int) -> None:
    case = make_case(83, K, COLUMNS, HV=1, dtype=torch.bfloat16)
    result, o, state = prefill(program, case, processor)
    assert result == PROCESSORS[processor]
    assert_exact("chunk_gated_delta_rule", case, (o, state))


@pytest.mark.parametrize("name", ["base_k128", "wide_k256", "strong_gate", "same_keys"])
def test_bfmmla_is_as_exact_as_fla(program: Path, name: str) -> None:
    golden = load(name)
    case = golden.case
    o, state = torch.empty_like(case.v), torch.empty(case.v.size(2), case.k.size(3), case.v.size(3))
    for head in range(case.v.size(2)):
        shared = case.map(lambda x, head=head: x[:, :, head * x.size(2) // case.v.size(2)].unsqueeze(2))
        for first in range(0, case.v.size(3), COLUMNS):
            columns = slice(first, first + COLUMNS)
            panel = replace(shared, v=shared.v[..., columns], initial_state=torch.zeros(case.k.size(3), COLUMNS))
            _, o[:, :, head : head + 1, columns], state[head, :, columns] = prefill(program, panel, "max")
    for part in recorded.end_to_end_parts(golden, "chunk_gated_delta_rule", o, state.unsqueeze(0)):
        assert part.kept, str(part)


def test_a_limited_capability_takes_no_bfmmla(program: Path) -> None:
    case = make_case(8, 16, COLUMNS, HV=1, dtype=torch.bfloat16)
    assert prefill(program, case, "max", ATEN_CPU_CAPABILITY="default")[0] == "floats"
