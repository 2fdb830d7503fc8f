"""The check of machine code for Apple's GPUs, as the table shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from evidence.lab.agx import calibration, compiler, table
from evidence.proof.checks import Finding, Progress, check
from evidence.proof.metal import caps, launches
from evidence.proof.metal.front_end import shader_text
from torch_gdn._recorder import Launch

JOBS = 2


def recorded_launches() -> list[Launch]:
    """Returns what models launch, and each kernel's variant with the most registers by the model of strict Metal."""
    wanted = {launch.variant.name: launch for launch in launches.model_launches()}
    widest = {cap.most_registers for cap in caps.recorded().values()}
    for launch in launches.all_launches():
        if launch.variant.name in widest:
            wanted.setdefault(launch.variant.name, launch)
    return list(wanted.values())


def compile_launch(launch: Launch) -> compiler.Compiled:
    variant = launch.variant
    return compiler.compile_program(shader_text(variant.file), variant.kernel, variant.arguments, launch.threads)


def compile_all(wanted: Iterable[Launch], progress: Progress) -> list[compiler.Compiled]:
    compiler.root()  # so that it is made only once
    work = list(wanted)
    progress.expect(len(work))
    compiled = []
    with ProcessPoolExecutor(JOBS) as pool:
        for done in as_completed([pool.submit(compile_launch, launch) for launch in work]):
            compiled.append(done.result())
            progress.step(compiled[-1].name)
    return sorted(compiled, key=lambda each: each.name)


@check("apple-isa", "Mesa's compiler makes machine code for M1 and M2 that breaks no rule and has the recorded figures")
def apple_isa_check(progress: Progress) -> Finding:
    return finding_of(compile_all(recorded_launches(), progress), compiler.versions())


def finding_of(compiled: Sequence[compiler.Compiled], versions: str) -> Finding:
    result = table.table(compiled)
    then, before = table.recorded()
    problems = [f"{each.name}: {problem}" for each in compiled for problem in each.problems]
    notes = [
        f"the figures of each variant: {table.TABLE}; advice where they are absolute, for the compiler is not Apple's",
        *([f"recorded with {then}; these figures are by {versions}"] if before and then != versions else []),
        f"{len(table.spilling(result))} of {len(result)} variants spill in both pipelines",
        *(f"{each.name}: Mesa fails: {pipeline} {why}" for each in compiled for pipeline, why in each.failures.items()),
        *(f"not as recorded: {line}" for line in table.changed(before, result)),
    ]
    return Finding(len(compiled), problems, notes, {table.TABLE: table.text(versions, result)})


@check("apple-isa-calibration", "for llama.cpp's kernels, that compiler gives nearly the figures of Apple's compiler")
def calibration_check(progress: Progress) -> Finding:
    progress.expect(1)
    compiled = calibration.compiled()
    progress.step("compiled")
    threads = {
        kernel: {pipeline: figures.threads for pipeline, figures in each.figures.items()}
        for kernel, each in compiled.items()
    }
    notes = [
        f"{kernel}: Apple's {calibration.OF_APPLE[kernel]} threads, {', '.join(f'{p} {n}' for p, n in of.items())}"
        for kernel, of in threads.items()
    ]
    broken = [f"{kernel}: {problem}" for kernel, each in compiled.items() for problem in _not_rules(each)]
    return Finding(len(compiled), [*broken, *calibration.problems_of(threads)], notes)


def _not_rules(compiled: compiler.Compiled) -> list[str]:
    """Returns what kept it from being compiled. The rules are for our own kernels."""
    return compiled.problems if not compiled.figures and not compiled.failures else []
