"""Writes what the last runs found: verdicts.tsv has a line for each fault, and docs/lab/mutation.md the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence.proof.mutate.faults import CHECKOUT, KINDS, PARTS, Fault
from evidence.proof.mutate.rates import Row, section
from evidence.proof.mutate.trial import CAUGHT, NOT_RUN, Verdict

PAGE = CHECKOUT / "docs" / "lab" / "mutation.md"
RECORD = Path(__file__).with_name("verdicts.tsv")
COLUMNS = ("fault", "kind", "verdict", "found by")
TEXT = """\
# Mutation testing

**{count} planted faults: {words}.**

| fault | {parts} | all |
|---|{rules}---|
{rows}

`python -m evidence.proof.mutate` tests the tests. It plants these faults one at a time in a copy of the checkout, in
the shaders, the host code of Metal, the contracts, the CPU kernels, and the Python code. It then runs the tests for the
broken file until one fails.

    python -m evidence.proof.mutate                  # every fault that is new, or whose file or tests changed
    python -m evidence.proof.mutate --only barrier   # faults with this word in name, kind or file; --list only lists
    them python -m evidence.proof.mutate --jobs 8         # eight at a time python -m evidence.proof.mutate --sample 10
    # a fixed sample of every kind and part, as in `make proof` python -m evidence.proof.mutate --write          #
    records the verdicts, and writes this page

`evidence/proof/mutate/verdicts.tsv` names each fault and the test that found it first. A fault in
`evidence/proof/mutate/faults/` names a file, a text that occurs in it once, and the text that replaces it. It must
change what a program can see. A test that also fails without the fault does not count. If a test takes seconds without
the fault and two minutes of processor time with it, the fault counts as caught. The tests first run with a sample of
their sweeps. If they pass, they run again with every case. A run is a fork of a process that has imported PyTorch and
transformers (`evidence/proof/mutate/forks.py`). `build/mutate/` keeps the verdicts, so you can stop a run and continue
it.
"""


def record_text(faults: Sequence[Fault], verdicts: Mapping[str, Verdict]) -> str:
    """Returns a line for each fault. One without a verdict was not run."""
    rows = [(fault, verdicts.get(fault.id, Verdict(NOT_RUN))) for fault in faults]
    lines = [COLUMNS, *((fault.id, fault.kind, verdict.word, verdict.test) for fault, verdict in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def recorded(text: str) -> dict[str, Verdict]:
    _, *lines = text.splitlines()
    cells = [line.split("\t") for line in lines]
    return {fault: Verdict(word, test) for fault, _, word, test in cells}


def page_text(faults: Sequence[Fault], verdicts: Mapping[str, Verdict], drawn: Sequence[Row] = ()) -> str:
    counts = Counter(verdicts[fault.id].word for fault in faults)
    words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    result = Counter((fault.kind, fault.part) for fault in faults)
    rows = []
    for kind, what in KINDS.items():
        numbers = [result[kind, part] for part in PARTS]
        rows.append(f"| {what} (`{kind}`) | {' | '.join(str(number or '') for number in numbers)} | {sum(numbers)} |")
    missed = [f"- {fault.id}: {verdicts[fault.id].word}" for fault in faults if verdicts[fault.id].word != CAUGHT]
    page = TEXT.format(count=len(faults), words=words, parts=" | ".join(PARTS.values()), rules="---|" * len(PARTS),
                       rows="\n".join(rows))  # fmt: skip
    page += "\n## Not caught\n\n" + "\n".join(missed) + "\n" if missed else ""
    return page + section(drawn)
