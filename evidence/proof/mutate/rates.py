"""Writes what drawn mutants showed: drawn.tsv has a line for each, and docs/lab/mutation.md a rate for each folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from evidence.proof.mutate.faults import Fault
from evidence.proof.mutate.trial import CAUGHT, LATE, MISSED, SAMPLED, Verdict

RECORD = Path(__file__).with_name("drawn.tsv")
COLUMNS = ("seed", "mutant", "verdict", "found by", "judged")
COUNT = 20  # `make proof` draws this many
SECONDS = 600  # for one run of the tests; only a mutant that never ends takes so long
EQUIVALENT = "equivalent"  # begins a person's judgement that no program can see the mutant
CAUGHT_SINCE = "caught since"  # begins one that names a newer test, or one that the mutant's selection omitted
TEXT = """
## Random mutants

`python -m evidence.proof.mutate.drawn 20 --seed 7` draws random mutants. It applies the rules in
`evidence/proof/mutate/rules/` to the shaders, the Python code and `csrc/`: another comparison, a bound off by one, a
dropped barrier, a dropped guard, swapped strides, a wrong constant. A mutant runs the tests that can see it. `make
proof` draws {count} new ones each time, and prints their seed. `evidence/proof/mutate/drawn.tsv` has each mutant whose
line is still in the sources, and an assessment of each that no test caught.

{rates}

The rate counts mutants that build, that a program can see, and whose tests end in {minutes} minutes. For mutants of
seeds 40, 284731, 487850 and 1795952850 that no test caught, we wrote new tests. The mutants of seed 1126 were drawn
after those of seed 40.
The tests caught {seeds}.
"""


@dataclass(frozen=True)
class Row:
    seed: str
    mutant: str
    word: str
    test: str
    judged: str = ""

    @property
    def file(self) -> str:
        return self.mutant.partition("/")[2].partition(":")[0]

    @property
    def folder(self) -> str:
        """Returns the first two folders of the file."""
        return "/".join(self.file.split("/")[:-1][:2])

    @property
    def counts_as(self) -> str:
        if self.judged.startswith(EQUIVALENT):
            return EQUIVALENT
        return CAUGHT if self.judged.startswith(CAUGHT_SINCE) else self.word

    def refit(self, checkout: Path) -> Row | None:
        """Returns the row with its line's file and number of today, or None if the line is gone.

        If the line is no longer in its file, the one other file that has it counts.
        """
        part, (number, _, rest) = self.mutant.partition("/")[0], self.mutant.partition(":")[2].partition(": ")
        files = lines_in(checkout / self.file.partition("/")[0], Path(self.file).suffix)
        path = checkout / self.file
        for line in (rest[: arrow.start()] for arrow in re.finditer(" -> ", rest)):  # a line of Python may have one too
            found = [path] if line in files.get(path, ()) else [each for each, lines in files.items() if line in lines]
            if len(found) == 1:
                numbers = [n for n, text in enumerate(files[found[0]], 1) if text == line]
                nearest = min(numbers, key=lambda n: abs(n - int(number)))
                return replace(self, mutant=f"{part}/{found[0].relative_to(checkout)}:{nearest}: {rest}")
        return None


@cache
def lines_in(folder: Path, suffix: str) -> dict[Path, list[str]]:
    return {
        path: [line.strip() for line in path.read_text().splitlines()] for path in sorted(folder.rglob(f"*{suffix}"))
    }


def read_record(text: str) -> list[Row]:
    return [Row(*line.split("\t")) for line in text.splitlines()[1:]]


def record_text(rows: Iterable[Row]) -> str:
    lines = [COLUMNS, *((row.seed, row.mutant, row.word, row.test, row.judged) for row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def with_verdicts(
    rows: Sequence[Row], seed: str, faults: Sequence[Fault], verdicts: Mapping[str, Verdict]
) -> list[Row]:
    """Returns the rows with these verdicts. Judgements stay where a mutant is still not caught."""
    known = {row.mutant: row for row in rows}
    for fault in faults:
        if (verdict := verdicts.get(fault.id)) and verdict.word != SAMPLED:
            old = known.get(fault.id)
            judged = old.judged if old and verdict.word in (MISSED, LATE) else ""
            known[fault.id] = Row(seed, fault.id, verdict.word, verdict.test, judged)
    return list(known.values())


def rates(rows: Sequence[Row]) -> str:
    counted = Counter[tuple[str, str]]()
    for row in rows:
        if row.counts_as in (CAUGHT, MISSED, LATE, EQUIVALENT):
            for folder in (row.folder, "all"):
                counted[folder, row.counts_as] += 1
    lines = [
        "| folder | mutants | equivalent | caught | took too long | not caught | rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in [*sorted({folder for folder, _ in counted} - {"all"}), "all"]:
        equivalent, caught, late, missed = (counted[folder, word] for word in (EQUIVALENT, CAUGHT, LATE, MISSED))
        seen = caught + missed
        rate = f"{100 * caught // seen} %" if seen else ""
        cells = (folder, seen + equivalent + late, equivalent or "", caught or "", late or "", missed or "", rate)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def by_seed(rows: Sequence[Row]) -> str:
    counted = Counter((row.seed, row.counts_as) for row in rows)
    result = {seed: (counted[seed, CAUGHT], counted[seed, MISSED]) for seed in dict.fromkeys(row.seed for row in rows)}
    return ", ".join(f"{caught} of {caught + missed} of seed {seed}" for seed, (caught, missed) in result.items())


def section(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return TEXT.format(count=COUNT, rates=rates(rows), minutes=SECONDS // 60, seeds=by_seed(rows))
