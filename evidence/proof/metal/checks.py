"""Defines the checks of strict Metal, as the table shows them."""

from __future__ import annotations

from evidence.proof.checks import Finding, Progress, check
from evidence.proof.metal import caps as strict_caps
from evidence.proof.metal import examples as strict_examples
from evidence.proof.metal import kernels as strict_kernels
from evidence.proof.metal import launches as strict_launches
from evidence.proof.metal import others as strict_others
from evidence.proof.metal import vocabulary
from evidence.proof.metal.facts import ISA_REGISTERS


@check("strict-rules", "each of Metal's rules refuses its example, and accepts the corrected example")
def strict_rules_check(progress: Progress) -> Finding:
    examples = strict_examples.examples()
    progress.expect(len(examples))
    problems = []
    for example in examples:
        problems += example.problems()
        progress.step(example.name)
    return Finding(2 * len(examples), problems)


@check("strict-metal", "every kernel variant compiles under Metal's address spaces, rules and limits, with no warning")
def strict_metal_check(progress: Progress) -> Finding:
    launches = strict_launches.all_launches()
    wanted = [launch.variant for launch in launches]
    outcome = strict_kernels.check_variants(wanted, progress)
    problems = [*outcome.problems, *strict_kernels.not_seen(wanted, outcome), *strict_kernels.unlaunched_shaders()]
    problems += strict_kernels.unlike_the_host(launches, outcome.facts)
    kernels = {variant.name: variant.kernel for variant in wanted}
    problems += strict_caps.over_cap(outcome.facts, kernels, strict_caps.recorded())
    strict_kernels.write_table(outcome.facts)
    in_models = {launch.variant.name for launch in strict_launches.model_launches()}
    caps = strict_caps.by_kernel(outcome.facts, kernels, in_models)
    tables = {strict_caps.TABLE: strict_caps.text(caps)} if not outcome.problems else {}
    over = sum(cap.over_isa for cap in caps.values())
    notes = [
        f"the facts of each: {strict_kernels.TABLE}; the most of each kernel, which caps it: {strict_caps.TABLE}",
        f"by the model {over} variants take more than the {ISA_REGISTERS} registers that a thread has",
    ]
    most = max(outcome.facts, key=lambda facts: facts.thread_bytes, default=None)
    notes += [f"most arrays and fragments: {most.thread_bytes} bytes a thread, {most.name}"] if most else []
    return Finding(len(wanted), problems, notes, tables)


@check("vocabulary", "every Metal name in the shaders also occurs in sources that Apple's compiler is known to accept")
def vocabulary_check(progress: Progress) -> Finding:
    progress.expect(2)
    words = vocabulary.words(vocabulary.trees_of_kernels())
    progress.step("read the shaders")
    projects = vocabulary.projects()
    named = vocabulary.sources(words, projects)
    progress.step("read the others")
    problems = [f"no known Metal source has the {word.kind} '{word.text}'" for word in words if not named[word]]
    notes = [f"{project.name} {project.version}: {len(project.files)} files" for project in projects]
    return Finding(len(words), problems, notes, {vocabulary.TABLE: vocabulary.table_text(named)})


@check("metal-of-others", "the same front end accepts MLX's and PyTorch's Metal sources, or has a known reason not to")
def metal_of_others_check(progress: Progress) -> Finding:
    problems, notes, cases, compiled = [], [], 0, 0
    for project, verdicts in strict_others.judge_all(progress).items():
        cases += len(verdicts)
        taken = sum(not verdict.messages for verdict in verdicts)
        compiled += taken
        notes.append(f"{project.name} {project.version}: {taken} of {len(verdicts)} files compile")
        notes += strict_others.refusal_notes(verdicts)
        problems += strict_others.unexplained(verdicts)
    return Finding(cases, problems, notes, kinds={"compile": compiled, "refused": cases - compiled})
