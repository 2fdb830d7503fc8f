"""Runs Metal that MLX and PyTorch ship through our front end: here a part that is quick, in `make proof` all of it."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

import pytest

from evidence.proof.checks import Silent
from evidence.proof.metal import others as strict_others
from evidence.proof.metal import vocabulary
from evidence.proof.metal.others import Verdict
from evidence.proof.reasons import Unavailable
from evidence.tests.proof.needs import needs_clang

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]

PARTS = {
    "mlx": ("*/gated_delta_*.h", "*/kernels/softmax.h", "*/steel/attn/*.h", "*/steel/gemm/gemm.h"),
    "torch": ("*/c10/metal/*.h", "*/kernels/PrefillAttention.h"),
}
HOUSES = {"mlx": vocabulary.mlx, "torch": vocabulary.torch}


@pytest.fixture(params=sorted(HOUSES), scope="module")
def project(request: pytest.FixtureRequest) -> vocabulary.Project:
    try:
        result = HOUSES[request.param]()
    except Unavailable as reason:
        pytest.skip(str(reason))
    files = (path for path in result.files if any(fnmatch(str(path), part) for part in PARTS[result.name]))
    return replace(result, files=tuple(files))


def test_is_taken_or_refused_for_a_known_reason(project: vocabulary.Project) -> None:
    (verdicts,) = strict_others.judge_all(Silent(), [project]).values()
    assert strict_others.unexplained(verdicts) == []
    assert sum(not verdict.messages for verdict in verdicts) >= 10


@pytest.mark.parametrize(
    ("file", "message", "known"),
    [
        ("mlx/backend/metal/kernels/steel/gemm/nax.h", "'MetalPerformancePrimitives/M.h' file not found", True),
        ("mlx/backend/metal/kernels/steel/gemm/nax.h", "use of undeclared identifier 'simd_sum'", False),
        ("mlx/backend/metal/kernels/softmax.h", "lambda expressions are not supported in Metal", False),
    ],
)
def test_a_reason_is_for_its_files_and_its_message(file: str, message: str, known: bool) -> None:
    verdict = Verdict(file, (f"{file}:1:1: error: {message}",))
    assert (verdict.reason != "") == known
    assert bool(strict_others.unexplained([verdict])) != known
    assert bool(strict_others.refusal_notes([verdict])) == known
