"""The faults, from the tables in evidence/proof/mutate/faults/, and the tests that must notice them.

A table is named after the part of the tree that it breaks. A fault in it:

    [[fault]]
    name = "l2norm: no eps"
    kind = "number"
    file = "shaders/layers/l2norm.metal"
    text = 'simd_sum(sum) + parameters.eps'      # occurs exactly once in the file
    replacement = 'simd_sum(sum)'
    tests = ["tests/layers/test_l2norm.py"]      # instead of those that claim the file

tests.toml says which tests claim a file. An entry of `tests` is a pytest argument, or `proof NAME`, a check of
`python -m evidence.proof`.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[3]
TABLES = Path(__file__).parent / "faults"
CHECKS = Path(__file__).parents[1]
PROOF = "proof "  # precedes the name of a check in a fault's list of tests
PARTS = {
    "shaders": "shaders",
    "metal": "host code of Metal",
    "ops": "contracts",
    "cpu": "CPU kernels",
    "python": "Python",
}
KINDS = {
    "barrier": "a barrier dropped or weakened",
    "bound": "a bound or mask off by one, a last partial chunk",
    "head": "the wrong head",
    "offset": "a storage offset, a stride or a slot's offset dropped",
    "rounding": "rounded too early, or to the wrong type",
    "number": "an eps, a clamp, a factor or the math mode wrong",
    "width": "a 64-bit index narrowed",
    "initial": "a sum or a tile that does not start from zero",
    "table": "tables or arguments swapped",
    "slot": "the wrong rule for sequences without a slot",
    "check": "an argument that is no longer checked",
}


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    part: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    words: str = ""  # pytest's -k for the names of tests

    @property
    def id(self) -> str:
        return f"{self.part}/{self.name}"

    def plant(self, source: str) -> str:
        result = source.count(self.text)
        if result != 1:
            raise ValueError(f"{self.id}: expected its text once in {self.file}, found it {result} times")
        return source.replace(self.text, self.replacement)


def read_table(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text())


def tests_of(file: str, claims: dict[str, list[str]], checkout: Path, op: str = "") -> tuple[str, ...]:
    """Returns the tests of the op, and of the one that the file is named after, then those of the first pattern that
    fits the file. A file may have several ops.
    """
    named = [
        path for stem in {op or Path(file).stem, Path(file).stem} for path in checkout.glob(f"tests/*/test_{stem}.py")
    ]
    claimed = next((tests for pattern, tests in claims.items() if fnmatch.fnmatch(file, pattern)), [])
    return tuple(dict.fromkeys([*(str(path.relative_to(checkout)) for path in sorted(named)), *claimed]))


@cache
def functions_in(file: str) -> set[str]:
    return set(re.findall(r"^ *def (\w+)\(", (CHECKOUT / file).read_text(), re.MULTILINE))


def exists(test: str) -> bool:
    """Returns whether a file of tests, a function in it, or a check of `evidence.proof` exists."""
    if test.startswith(PROOF):
        return any(f'@check("{test.removeprefix(PROOF)}"' in path.read_text() for path in CHECKS.rglob("checks.py"))
    file, _, name = test.partition("::")
    is_there = (CHECKOUT / file).exists()
    return is_there and (not name or name.partition("[")[0].rpartition("::")[2] in functions_in(file))


def all_faults() -> list[Fault]:
    claims = read_table(TABLES / "tests.toml")
    faults = []
    for part in PARTS:
        entries = [entry for path in sorted(TABLES.glob(f"{part}*.toml")) for entry in read_table(path)["fault"]]
        for entry in entries:
            op = entry["name"].partition(":")[0].rstrip("_")
            tests = tuple(entry.pop("tests", ())) or tests_of(entry["file"], claims, CHECKOUT, op)
            faults.append(Fault(part=part, tests=tests, **entry))
    return faults


def sample(faults: Sequence[Fault], count: int) -> list[Fault]:
    """Takes kinds in turn, and of each kind a fault of the part that was taken least so far."""
    remaining, chosen = list(faults), list[Fault]()
    while remaining and len(chosen) < count:
        for kind in KINDS:
            same_kind = [fault for fault in remaining if fault.kind == kind]
            if same_kind and len(chosen) < count:
                parts = [fault.part for fault in chosen]
                chosen.append(min(same_kind, key=lambda fault: parts.count(fault.part)))
                remaining.remove(chosen[-1])
    return chosen
