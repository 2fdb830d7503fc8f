"""Runs every kernel variant through the strict front end, its rules and its facts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from evidence.proof.checks import Progress
from evidence.proof.metal.facts import Facts, examine
from evidence.proof.metal.front_end import (
    CHECKOUT,
    SHADERS,
    Refused,
    compile_strictly,
    instantiation,
    shader_text,
    tools,
)
from evidence.proof.metal.launches import model_launches, probe_launches
from evidence.proof.metal.rules import check_rules, no_recursion
from evidence.proof.metal.tree import Layout, read_tree
from evidence.proof.metal.values import NotUnderstood
from torch_gdn._recorder import KernelVariant, Launch

TABLE = CHECKOUT / "build" / "kernel_variants.tsv"  # the strict-metal check writes it
JOBS = 2
TOGETHER = 24  # variants of one kernel that clang compiles at once
FIRST_LINE = '#pragma clang diagnostic ignored "-Wc++17-extensions"\n'


def unlaunched_shaders() -> list[str]:
    """Reports shaders with a kernel that neither a call nor a probe launches, because the checks would not see it."""
    known = {launch.variant.file for launch in [*model_launches(), *probe_launches()]}
    files = (str(path.relative_to(SHADERS)) for path in sorted(SHADERS.rglob("*.metal")))
    return [f"{file} is launched by no entry of check/torch_gdn_check/registry" for file in files if file not in known]


def unlike_the_host(launches: Iterable[Launch], facts: Iterable[Facts]) -> list[str]:
    """Reports launches that bind another number of buffers than the kernel takes, that bind as two buffers what it
    may write, or whose threads are no whole simdgroups.
    """
    by_name = {each.name: each for each in facts}
    problems = []
    for launch in launches:
        name, kernel = launch.variant.name, by_name.get(launch.variant.name)
        if launch.threads % 32 or not 32 <= launch.threads <= 1024:
            problems.append(f"{name}: the host launches {launch.threads} threads a threadgroup")
        if kernel is None:
            continue
        if launch.bindings != kernel.buffers:
            problems.append(f"{name}: the host binds {launch.bindings} buffers, the kernel takes {kernel.buffers}")
        problems += [
            f"{name}: the host binds memory that the kernel may write as buffers {one} and {other}"
            for one, other in launch.overlaps
            if not kernel.written.isdisjoint((one, other))
        ]
    return problems


@dataclass
class Outcome:
    problems: list[str]
    facts: list[Facts]


def check_source(source: str) -> Outcome:
    """Checks a whole Metal program with the front end, the rules and the limits."""
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
            result, more = examine(tree, layout, kernel)
        except NotUnderstood as reason:
            over.append(f"{kernel.name}: {reason}: the checks have no rule for it")
            continue
        facts.append(result)
        problems |= more
        over += result.over_limit()
    return Outcome([*(str(problem) for problem in sorted(problems)), *over], facts)


def batches(variants: Iterable[KernelVariant]) -> Iterator[list[KernelVariant]]:
    by_kernel = sorted(variants, key=lambda each: each.kernel)
    for _, group in itertools.groupby(by_kernel, key=lambda each: each.kernel):
        members = list(group)
        for first in range(0, len(members), TOGETHER):
            yield members[first : first + TOGETHER]


def source_of(variants: Sequence[KernelVariant]) -> str:
    """Writes the source as the host does, but with several instances after one shader."""
    lines = [instantiation(each.kernel, each.arguments) for each in variants]
    return FIRST_LINE + shader_text(variants[0].file) + "".join(lines)


def check_batch(variants: Sequence[KernelVariant]) -> Outcome:
    outcome = check_source(source_of(variants))
    if not outcome.facts and not outcome.problems:
        outcome.problems.append(f"{variants[0].file}: no kernel was seen")
    return outcome


def check_variants(variants: Iterable[KernelVariant], progress: Progress) -> Outcome:
    tools()  # so that they are built only once
    work = list(batches(variants))
    progress.expect(len(work))
    problems, facts = [], []
    with ProcessPoolExecutor(JOBS) as pool:
        for done in as_completed([pool.submit(check_batch, batch) for batch in work]):
            outcome = done.result()
            problems += outcome.problems
            facts += outcome.facts
            progress.step(outcome.facts[-1].name if outcome.facts else "refused")
    return Outcome(sorted(set(problems)), sorted(facts, key=lambda each: each.name))


def not_seen(wanted: Iterable[KernelVariant], outcome: Outcome) -> list[str]:
    """Reports variants without facts, unless a program was refused."""
    if outcome.problems:
        return []
    seen = {facts.name for facts in outcome.facts}
    return [f"{each.name} was not seen" for each in wanted if each.name not in seen]


def write_table(facts: Sequence[Facts]) -> None:
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table_text(facts))


def table_text(facts: Sequence[Facts]) -> str:
    rows = [Facts.COLUMNS, *(each.row() for each in facts)]
    return "".join("\t".join(row) + "\n" for row in rows)
