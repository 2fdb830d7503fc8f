"""Runs other projects' Metal through our front end. If it refuses what Apple's compiler is known to take, its verdict
on our shaders is worth less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from evidence.proof.checks import Progress
from evidence.proof.metal.front_end import Refused, check_others, tools
from evidence.proof.metal.vocabulary import Project, projects

JOBS = 2
MLX = "mlx/backend/metal/kernels/"

# Neither project's headers stand alone. The files that include them include these first.
METAL = "#include <metal_stdlib>\nusing namespace metal;\n"
BEFORE: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"{MLX}quantized.h", ("steel/gemm/gemm.h",)),
    (f"{MLX}fp_quantized.h", ("steel/gemm/gemm.h",)),
    (f"{MLX}indexing/scatter*.h", ("atomic.h",)),
    (f"{MLX}reduction/ops.h", ("atomic.h",)),
    (f"{MLX}reduce.h", ("atomic.h", "reduction/ops.h")),
    (f"{MLX}reduction/reduce_*.h", ("atomic.h", "reduction/ops.h")),
    (f"{MLX}searchsorted.h", ("sort.h",)),
    (f"{MLX}steel/conv/*.h", ("steel/defines.h", "steel/utils.h", "steel/conv/params.h", "steel/conv/conv.h")),
    (f"{MLX}steel/gemm/kernels/*.h", ("steel/gemm/gemm.h",)),
    ("ATen/native/mps/kernels/Sort*.h", ("c10/metal/utils.h", "ATen/native/mps/kernels/SortMerge.h")),
    ("ATen/native/mps/kernels/*Attention.h", ("c10/metal/utils.h",)),
)


@dataclass(frozen=True)
class Refusal:
    """Files that our front end does not take, and the reason: it is right to refuse them, or it has a limit."""

    files: str
    message: str
    reason: str


METAL_4 = "Metal 4: tensor operations, or lambdas, which no language version before it has"
OUR_LIMIT = "a limit of ours: bfloat is a class here, so `?:` gives float where its two bfloats lie in different memory"
REFUSALS = (
    Refusal(f"{MLX}*nax*.h", "MetalPerformancePrimitives|lambda expressions", METAL_4),
    Refusal("ATen/native/mps/kernels/*.h", "no viable overloaded '='|no viable conversion from 'float'", OUR_LIMIT),
)


@dataclass(frozen=True)
class Verdict:
    file: str
    messages: tuple[str, ...]  # empty if it compiles

    @property
    def reason(self) -> str:
        """Returns why it is refused, or "" if REFUSALS has no entry for it."""
        for refusal in REFUSALS:
            if fnmatch(self.file, refusal.files) and re.search(refusal.message, self.messages[0]):
                return refusal.reason
        return ""


def include_root(project: Project) -> Path:
    return project.root if project.name == "torch" else project.root.parents[3]


def source_of(project: Project, file: str) -> str:
    before = [name for pattern, names in BEFORE if fnmatch(file, pattern) for name in names]
    if project.name == "mlx":
        before = [MLX + name for name in ("utils.h", *before)]
    lines = (f'#include "{name}"\n' for name in (*before, file))
    return (METAL if project.name == "torch" else "") + "".join(lines)


def judge(project: Project, path: Path) -> Verdict:
    root = include_root(project)
    file = str(path.relative_to(root))
    try:
        check_others(source_of(project, file), [root])
    except Refused as refused:
        return Verdict(file, tuple(message.replace(f"{root}/", "") for message in refused.messages))
    return Verdict(file, ())


def judge_all(progress: Progress, of: Sequence[Project] | None = None) -> dict[Project, list[Verdict]]:
    tools()
    of = projects() if of is None else of
    verdicts: dict[Project, list[Verdict]] = {}
    with ThreadPoolExecutor(JOBS) as pool:
        for project in of:
            progress.expect(len(project.files))
            verdicts[project] = []
            for verdict in pool.map(lambda path, project=project: judge(project, path), project.files):
                progress.step(verdict.file)
                verdicts[project].append(verdict)
    return verdicts


def refusal_notes(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns one line for each reason: how many files, and which."""
    files: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.messages and verdict.reason:
            files.setdefault(verdict.reason, []).append(verdict.file.removeprefix(MLX))
    return [f"{len(names)} refused, {reason}: {', '.join(names)}" for reason, names in files.items()]


def unexplained(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns refusals that REFUSALS does not explain."""
    refused = (verdict for verdict in verdicts if verdict.messages and not verdict.reason)
    return [f"{verdict.file} is refused for no known reason: {verdict.messages[0]}" for verdict in refused]
