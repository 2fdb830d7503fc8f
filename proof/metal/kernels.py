"""Every specialisation of every kernel, through the strict front end, its rules and its facts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from proof.checks import Progress
from proof.metal.facts import Facts, examine
from proof.metal.front_end import SHADERS, Refused, compile_strictly, instantiation, shader_text, tools
from proof.metal.rules import check_rules, no_recursion
from proof.metal.tree import Layout, read_tree
from proof.metal.values import NotUnderstood
from torch_gdn import specialisations_aura, specialisations_modules
from torch_gdn.specialisations import DTYPES, MODEL_SIZES, OTHER_SIZES, Specialisation, Variant, of_variants
from torch_gdn.tuning_cache import FUSED_CHUNK_SIZES

TABLE = Path(__file__).with_name("specialisations.tsv")
JOBS = 2
TOGETHER = 24  # specialisations of one kernel that clang sees at once

# K and V are free up to 256 and 512. To the sizes of models and to those that torch_gdn.check compiles come K above V,
# and the largest odd sizes, with the most registers and no packet.
SIZES = (*MODEL_SIZES, *OTHER_SIZES, (192, 96), (255, 511))
CHUNK_SIZES = (16, 32, 64)
BOTH = (True, False)


def all_variants() -> list[Variant]:
    """Every dtype, chunk size, alignment, state layout, normalisation and way to call the stages; at the usual size and
    the largest, decays of channels and pools of other dtypes.
    """
    return (
        [
            Variant(dtype, K, V, chunk_size, aligned, value_inner, normalise, by_stage=by_stage)
            for dtype in DTYPES
            for K, V in SIZES
            for chunk_size in CHUNK_SIZES
            for aligned, value_inner, normalise, by_stage in itertools.product(BOTH, repeat=4)
        ]
        + [
            Variant(dtype, K, V, value_inner=value_inner, normalise=normalise, channels=channels, pool=pool)
            for dtype in DTYPES
            for K, V in ((128, 128), (255, 511))
            for value_inner, normalise in itertools.product(BOTH, repeat=2)
            for channels, pool in ((True, torch.float32), (False, torch.bfloat16), (False, torch.float16))
        ]
        + [
            Variant(dtype, K, V, aligned=aligned, wanted_chunk_size=size)
            for dtype in DTYPES
            for K, V in SIZES
            for aligned in BOTH
            for size in FUSED_CHUNK_SIZES
        ]
    )


LONGEST_ROWS = [Variant(dtype, 1024, 1) for dtype in DTYPES]  # that l2norm takes


def all_specialisations() -> list[Specialisation]:
    delta_rule = [*of_variants(all_variants()), *of_variants(LONGEST_ROWS, ["l2norm"])]
    return [*delta_rule, *specialisations_aura.table(), *specialisations_modules.every()]


def unlisted_shaders() -> list[str]:
    """Shaders with a kernel that no table of specialisations has: nothing would be shown of them."""
    known = {each.file for each in all_specialisations()}
    files = (str(path.relative_to(SHADERS)) for path in sorted(SHADERS.rglob("*.metal")))
    return [f"{file} is in no table of torch_gdn/specialisations*.py" for file in files if file not in known]


# Vectors whose length is no power of two, and codes that straddle words.
AWKWARD = [
    specialisations_aura.encoding(DTYPES[0], 3, 80),
    specialisations_aura.first_pass(3, 3, 80, 8),
    specialisations_aura.first_pass(3, 3, 512, specialisations_aura.MATRIX_ROWS),
]


def model_specialisations() -> list[Specialisation]:
    """What models call for in chunks of 64, and one awkward size: for every run of the tests."""
    variants = [
        Variant(
            dtype, K, V, 64, aligned=True, value_inner=value_inner, normalise=True, channels=value_inner and K == 128
        )
        for dtype in DTYPES
        for K, V in (*MODEL_SIZES, (33, 65))
        for value_inner in BOTH
    ]
    others = [*specialisations_aura.table(quick=True), *AWKWARD, *specialisations_modules.table()]
    return [*of_variants(variants), *others]


@dataclass
class Outcome:
    problems: list[str]
    facts: list[Facts]


def check_source(source: str) -> Outcome:
    """A whole Metal program: what the front end, the rules and the limits have against it."""
    try:
        translated, dump = compile_strictly(source)
    except Refused as refused:
        return Outcome(refused.messages, [])
    tree = read_tree(translated, dump)
    problems = set(check_rules(tree))
    if any(no_recursion(tree)):  # the rest follows calls
        return Outcome([str(problem) for problem in sorted(problems)], [])
    layout, facts, over = Layout(tree), [], []
    for kernel in tree.kernels:
        try:
            found, more = examine(tree, layout, kernel)
        except NotUnderstood as reason:
            over.append(f"{kernel.name}: {reason}: the checks have no rule for it")
            continue
        facts.append(found)
        problems |= more
        over += found.over_limit()
    return Outcome([*(str(problem) for problem in sorted(problems)), *over], facts)


def batches(specialisations: Iterable[Specialisation]) -> Iterator[list[Specialisation]]:
    by_kernel = sorted(specialisations, key=lambda each: each.kernel)
    for _, group in itertools.groupby(by_kernel, key=lambda each: each.kernel):
        members = list(group)
        for first in range(0, len(members), TOGETHER):
            yield members[first : first + TOGETHER]


def source_of(specialisations: Sequence[Specialisation]) -> str:
    """As the host writes it, but with several instances behind one shader."""
    lines = [instantiation(each.kernel, each.arguments) for each in specialisations]
    return shader_text(specialisations[0].file) + "".join(lines)


def check_batch(specialisations: Sequence[Specialisation]) -> Outcome:
    outcome = check_source(source_of(specialisations))
    if not outcome.facts and not outcome.problems:
        outcome.problems.append(f"{specialisations[0].file}: no kernel was seen")
    return outcome


def check_specialisations(specialisations: Iterable[Specialisation], progress: Progress) -> Outcome:
    tools()  # built once, here
    work = list(batches(specialisations))
    progress.expect(len(work))
    problems, facts = [], []
    with ProcessPoolExecutor(JOBS) as pool:
        for done in as_completed([pool.submit(check_batch, batch) for batch in work]):
            outcome = done.result()
            problems += outcome.problems
            facts += outcome.facts
            progress.step(outcome.facts[-1].name if outcome.facts else "refused")
    return Outcome(sorted(set(problems)), sorted(facts, key=lambda each: each.name))


def not_seen(wanted: Iterable[Specialisation], outcome: Outcome) -> list[str]:
    """Specialisations that neither have facts nor belong to a program that was refused."""
    if outcome.problems:
        return []
    seen = {facts.name for facts in outcome.facts}
    return [f"{each.name} was not seen" for each in wanted if each.name not in seen]


def table_text(facts: Sequence[Facts]) -> str:
    rows = [Facts.COLUMNS, *(each.row() for each in facts)]
    return "".join("\t".join(row) + "\n" for row in rows)
