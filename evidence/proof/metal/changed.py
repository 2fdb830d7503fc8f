"""`python -m evidence.proof.metal.changed [--base COMMIT]`: checks kernels whose shaders changed, in two minutes.

It takes what changed since COMMIT. The default is the merge base with the main branch, or the last commit if that
branch is checked out. It takes a fixed sample of what models launch of every kernel if there is no history, or if the
code that examines shaders has changed. It says what it took and what it left to `make proof`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from evidence.proof.checks import Progress, Silent
from evidence.proof.metal import caps as strict_caps
from evidence.proof.metal import kernels as strict_kernels
from evidence.proof.metal import launches as strict_launches
from evidence.proof.metal.front_end import CHECKOUT, SHADERS
from evidence.proof.reasons import Unavailable
from torch_gdn._recorder import KernelVariant, Launch

MAIN = ("origin/main", "origin/HEAD", "main")
EXAMINERS = ("evidence/proof/metal", "mps_simulator/src/mps_simulator/engine/compile", "check/torch_gdn_check")
MOST = 480  # variants, in two minutes on two cores
SAMPLE = 6  # variants per kernel


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def default_base() -> str | None:
    """Returns the commit to count changes from, or None if git knows none."""
    head = _git("rev-parse", "HEAD")
    for name in MAIN:
        base = _git("merge-base", name, "HEAD")
        if base and base != head:
            return base
    return _git("rev-parse", "HEAD~1")


def changed_files(base: str) -> list[str] | None:
    """Returns the files changed since the commit, including the working tree, or None if there is no such commit."""
    listed = _git("diff", "--name-only", base, "--")
    added = _git("ls-files", "--others", "--exclude-standard")
    return None if listed is None or added is None else sorted({*listed.split(), *added.split()})


def included(file: str) -> set[str]:
    """Returns a shader's files, below shaders/: itself and what it includes, directly or not."""
    result, open_ = {file}, [file]
    while open_:
        names = re.findall(r'^#include "([^"]+)"', (SHADERS / open_.pop()).read_text(), re.MULTILINE)
        open_ += [name for name in names if name not in result]
        result |= set(names)
    return result


def affected(shaders: Iterable[str], changed: Iterable[str]) -> set[str]:
    """Returns the shaders that include a changed file."""
    names = {path.removeprefix("shaders/") for path in changed if path.startswith("shaders/")}
    return {shader for shader in shaders if included(shader) & names}


def evenly(variants: Sequence[KernelVariant], count: int) -> list[KernelVariant]:
    """Returns `count` of them, spread over the whole list and including the last."""
    if count >= len(variants):
        return list(variants)
    return [variants[(i + 1) * len(variants) // count - 1] for i in range(count)]


def by_kernel(variants: Iterable[KernelVariant]) -> dict[str, list[KernelVariant]]:
    groups: dict[str, list[KernelVariant]] = {}
    for each in variants:
        groups.setdefault(each.kernel, []).append(each)
    return groups


def selection(
    groups: Mapping[str, Sequence[KernelVariant]], shaders: set[str] | None
) -> dict[str, list[KernelVariant]]:
    """Selects variants: all of the given shaders, as far as time allows, or a sample of all without shaders."""
    if shaders is None:
        return {kernel: evenly(variants, SAMPLE) for kernel, variants in groups.items()}
    wanted = {kernel: variants for kernel, variants in groups.items() if variants[0].file in shaders}
    total = sum(len(variants) for variants in wanted.values())
    share = min(1.0, MOST / total) if total else 1.0
    return {kernel: evenly(variants, max(SAMPLE, int(len(variants) * share))) for kernel, variants in wanted.items()}


def what_changed(base: str | None, shaders: set[str]) -> tuple[set[str] | None, str]:
    """Returns the affected shaders (None for a sample of all) and the reason in words."""
    changed = changed_files(base) if base else None
    if changed is None:
        return None, "git knows no earlier commit: a sample of every kernel"
    if any(path.startswith(EXAMINERS) for path in changed):
        return None, f"what examines the shaders changed since {base}: a sample of every kernel"
    result = affected(shaders, changed)
    return result, f"since {base} {len(result)} of {len(shaders)} kernels changed"


def examine(launches: Sequence[Launch], variants: Sequence[KernelVariant], progress: Progress) -> list[str]:
    outcome = strict_kernels.check_variants(variants, progress)
    kernels = {each.name: each.kernel for each in variants}
    return [
        *outcome.problems,
        *strict_kernels.not_seen(variants, outcome),
        *strict_kernels.unlike_the_host(launches, outcome.facts),
        *strict_caps.over_cap(outcome.facts, kernels, strict_caps.recorded()),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.proof.metal.changed", description=__doc__)
    parser.add_argument("--base", metavar="COMMIT", help="count changes from here")
    options = parser.parse_args(arguments)
    files = {str(path.relative_to(SHADERS)) for path in SHADERS.rglob("*.metal")}
    shaders, why = what_changed(options.base or default_base(), files)
    print(f"Strict Metal: {why}")
    if shaders is None:
        launches = strict_launches.model_launches()
    else:  # recording all launches takes a minute
        launches = strict_launches.all_launches() if shaders else []
    groups = by_kernel(launch.variant for launch in launches)
    chosen = selection(groups, shaders)
    for kernel, variants in groups.items():
        print(f"  {kernel}: {len(chosen.get(kernel, ()))} of {len(variants)} variants chosen")
    try:
        problems = examine(launches, [each for variants in chosen.values() for each in variants], Silent())
    except Unavailable as reason:
        print(f"not run: {reason}")
        return 2
    for problem in problems:
        print(f"WRONG: {problem}")
    print(f"{sum(map(len, chosen.values()))} variants chosen, {len(problems)} wrong; `make proof` takes all")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
