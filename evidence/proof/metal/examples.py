"""Checks an example for each rule, in rule_examples: a program that must be refused with given words, and its correct
twin, which must pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evidence.proof.metal.kernels import Outcome, check_source

RULES = Path(__file__).with_name("rule_examples")
REFUSED = "// refused: "


@dataclass(frozen=True)
class Example:
    name: str

    @property
    def refused(self) -> str:
        return (RULES / f"{self.name}.refused.metal").read_text()

    @property
    def accepted(self) -> str:
        return (RULES / f"{self.name}.accepted.metal").read_text()

    @property
    def words(self) -> str:
        """Returns a regular expression that a message about the refused program must match."""
        first = self.refused.splitlines()[0]
        assert first.startswith(REFUSED), f"{self.name}: the first line must give the words of the refusal"
        return first[len(REFUSED) :]

    def problems(self) -> list[str]:
        refused, accepted = check_source(self.refused), check_source(self.accepted)
        return [*self._not_refused(refused), *(f"{self.name}: accepted twin: {each}" for each in accepted.problems)]

    def _not_refused(self, outcome: Outcome) -> list[str]:
        if any(re.search(self.words, message) for message in outcome.problems):
            return []
        result = "; ".join(outcome.problems) or "nothing"
        return [f"{self.name}: expected to be refused with {self.words!r}, the front end reported: {result}"]


def examples() -> list[Example]:
    return [Example(path.name.split(".")[0]) for path in sorted(RULES.glob("*.refused.metal"))]
