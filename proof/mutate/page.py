"""docs/lab/mutation.md: every fault and the test that finds it, as the last run has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from proof.mutate.faults import CHECKOUT, KINDS, PARTS, Fault
from proof.mutate.trial import CAUGHT, PROOF, Verdict

PAGE = CHECKOUT / "docs" / "lab" / "mutation.md"
HEAD = """\
# Mutation testing

The tests are tested too. `python -m proof.mutate` plants {count} faults in the shaders, the host code of Metal, the
contracts and the CPU kernels, one at a time, in a copy of the checkout. It then runs the tests for the broken file
until one fails.

**{count} faults: {words}.**

    python -m proof.mutate                  # every fault that is new, or whose file or tests changed
    python -m proof.mutate --only barrier   # faults with this word in name, kind or file; --list only lists them
    python -m proof.mutate --jobs 8         # eight at a time
    python -m proof.mutate --sample 10      # a fixed sample of every kind and part, as in `make proof`
    python -m proof.mutate --write          # writes this page

A fault in `proof/mutate/faults/` is a file, a text that occurs in it once, and its replacement. It must change what
a program can see. A test that also fails without the fault does not count. Sweeps run with every case.
`build/mutate/` keeps the verdicts, so you can stop a run and continue it.
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def row_of(fault: Fault, verdict: Verdict) -> str:
    found_by = f"`{verdict.test.removeprefix('tests/')}`" if verdict.word == CAUGHT else f"**{verdict.word}**"
    if verdict.test.startswith(PROOF):
        found_by = f"`python -m {PROOF}--only {verdict.test.removeprefix(PROOF)}`"
    return f"| {cell(fault.name)} | {fault.kind} | {cell(found_by)} |"


def page_text(faults: Sequence[Fault], verdicts: Mapping[str, Verdict]) -> str:
    counts = Counter(verdicts[fault.id].word for fault in faults)
    words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    lines = [HEAD.format(count=len(faults), words=words)]
    lines += ["| kind | what | faults |", "|---|---|---|"]
    lines += [f"| {kind} | {what} | {sum(each.kind == kind for each in faults)} |" for kind, what in KINDS.items()]
    for part, title in PARTS.items():
        of_part = [fault for fault in faults if fault.part == part]
        if of_part:
            lines += ["", f"## In {title}", "", "| fault | kind | found by |", "|---|---|---|"]
            lines += [row_of(fault, verdicts[fault.id]) for fault in of_part]
    return "\n".join(lines) + "\n"
