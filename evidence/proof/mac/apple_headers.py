"""Compares each declaration in our stub headers of Apple's frameworks with Apple's API.

Two descriptions of the API are public. metal-cpp, in the mlx-metal wheel, has Metal and part of Foundation, with types.
Apple's open-source runtime headers, in the ziglang package, have objc/NSObject.h and dispatch/. If neither has a
declaration, its name is looked for among the selectors and classes that torch's own macOS library uses, and is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evidence.proof.checks import Finding
from evidence.proof.mac import metal_cpp, wheels
from evidence.proof.mac.declarations import Declaration, Key, apple_include_directories, objective_c, parse
from evidence.proof.mac.macho import Image

CHECKOUT = Path(__file__).resolve().parents[3]
SIMULATOR = Path("mps_simulator/src/mps_simulator")
METAL = SIMULATOR / "metal/include"
# One set is for the simulated device on Linux, and one for the Mac build. Metal's headers are the same in both.
STUB_SETS = {
    "simulated device": (SIMULATOR / "foundation/include", METAL),
    "Mac build": (Path("evidence/proof/mac/include"), METAL),
}
SOURCE = """
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>
#import <MetalPerformanceShadersGraph/MetalPerformanceShadersGraph.h>
#include <dispatch/dispatch.h>
"""
APPLE_SOURCE = "#include <objc/NSObject.h>\n#include <dispatch/dispatch.h>\n#include <sys/types.h>\n"
NOT_PARSED = ("os/log.h", "os/signpost.h")  # three integer types and a clock that Linux lacks


class Reference:
    """Apple's API as other sources describe it."""

    def __init__(self, declarations: Iterable[Declaration]) -> None:
        self.values: dict[Key, set[str]] = {}
        self.parents: dict[str, list[str]] = {}
        for declaration in declarations:
            self.values.setdefault(declaration.key, set()).add(declaration.value)
            # The class NSObject adopts the protocol NSObject. Both have one name here, so this is no parent.
            if declaration.key[0] == "parent" and declaration.key[1] != declaration.key[2]:
                self.parents.setdefault(declaration.key[1], []).append(declaration.key[2])

    def ancestors(self, name: str) -> list[str]:
        result = [name]
        for parent in self.parents.get(name, ()):
            result += self.ancestors(parent)
        return result

    def knows(self, owner: str) -> bool:
        """Returns whether it claims to know all of a class: every class of Metal, and NSObject."""
        return owner.startswith("MTL") or owner == "NSObject"

    def selectors(self) -> frozenset[str]:
        return frozenset(key[2].lstrip("+-") for key in self.values if key[0] == "method")

    def find(self, key: Key) -> set[str]:
        """Returns the values of a declaration, including inherited ones."""
        kind, *names = key
        if kind == "method":
            owner, selector = names
            return set().union(*(self.values.get((kind, each, selector), set()) for each in self.ancestors(owner)))
        if kind == "parent":
            child, parent = names
            return {""} if parent in self.ancestors(child)[1:] else set()
        return self.values.get(key, set())


@dataclass
class Comparison:
    agreed: list[Declaration] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    by_name: list[Declaration] = field(default_factory=list)  # torch's macOS library has the name; types are unknown
    not_covered: list[Declaration] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return len(self.agreed) + len(self.wrong) + len(self.by_name) + len(self.not_covered)


def reference(include: Path) -> Reference:
    """Reads metal-cpp, from its include folder, and Apple's runtime headers."""
    runtime = [Path(directory) for directory in apple_include_directories()[-1:]]
    unit = parse(APPLE_SOURCE, ["-DOS_OBJECT_USE_OBJC=0"])
    return Reference([*metal_cpp.read(include), *objective_c(unit, runtime)])


def stubs(root: Path = CHECKOUT) -> list[Declaration]:
    """Returns the declarations of both sets of stub headers, each once, from a checkout or an altered copy of one."""
    result: dict[tuple[Key, str], Declaration] = {}
    for folders in STUB_SETS.values():
        directories = [root / folder for folder in folders]
        # The simulated Mac's Availability.h has little, so Apple's comes first, for Apple's own headers.
        availability = f'#include "{apple_include_directories()[-1]}/Availability.h"\n'
        unit = parse(availability + SOURCE, [f"-I{directory}" for directory in directories])
        for declaration in objective_c(unit, directories):
            result.setdefault((declaration.key, declaration.value), declaration)
    return list(result.values())


def _named(declaration: Declaration, names: frozenset[str]) -> bool:
    """Returns whether an Apple-compiled library uses this selector, class or function."""
    return declaration.key[-1].lstrip("+-") in names


def compare(ours: Sequence[Declaration], apple: Reference, names: frozenset[str]) -> Comparison:
    """Sorts ours into those that agree with Apple's, differ, or have no counterpart. `names` are those that torch's
    library uses.
    """
    result = Comparison()
    for declaration in ours:
        expected = apple.find(declaration.key)
        kind, owner = declaration.key[:2]
        if declaration.value in expected:
            result.agreed.append(declaration)
        elif expected:
            theirs = " or ".join(sorted(expected))
            result.wrong.append(f"{declaration.where}: {declaration}, but Apple has {theirs}")
        elif kind == "parent" and declaration.key[2] == "NSObject":
            result.agreed.append(declaration)  # metal-cpp does not spell out the root
        elif kind in ("method", "enumerator", "parent") and apple.knows(owner):
            result.wrong.append(f"{declaration.where}: {declaration}, which Apple's headers do not have")
        elif _named(declaration, names):
            result.by_name.append(declaration)
        else:
            result.not_covered.append(declaration)
    return result


def expected_not_covered() -> frozenset[str]:
    """Returns the lines of not_covered.txt: declarations without a description, looked up by hand in Apple's pages."""
    lines = (Path(__file__).parent / "not_covered.txt").read_text().splitlines()
    return frozenset(line.partition(" # ")[0].strip() for line in lines if line and not line.startswith("#"))


def judge(comparison: Comparison) -> Finding:
    """A wrong declaration is a problem, and so is one without a counterpart, unless not_covered.txt lists it."""
    unlisted = {str(each): each for each in comparison.not_covered if str(each) not in expected_not_covered()}
    stale = expected_not_covered() - {str(each) for each in comparison.not_covered}
    problems = list(comparison.wrong)
    problems += [f"{each.where}: {each}, which no description of Apple's API has" for each in unlisted.values()]
    problems += [f"not_covered.txt lists {each}, which is declared no more, or covered" for each in sorted(stale)]
    kinds = {
        "agreed": len(comparison.agreed),
        "by name only": len(comparison.by_name),
        "not covered": len(comparison.not_covered),
    }
    if comparison.wrong:
        kinds["wrong"] = len(comparison.wrong)
    notes = [
        "agreed: with metal-cpp or Apple's runtime headers, types included",
        "by name only: torch's macOS library calls it, its types are not known",
        f"not covered: {'; '.join(str(each) for each in comparison.not_covered)}",
        f"not parsed: {', '.join(NOT_PARSED)}",
    ]
    return Finding(comparison.cases, problems, notes, kinds=kinds)


def names_used_by(image: Image) -> frozenset[str]:
    """Returns the selectors, classes and functions of Apple's that a Mac library calls."""
    imported = (symbol.name.removeprefix("_OBJC_CLASS_$").lstrip("_") for symbol in image.imports)
    return frozenset(image.selectors).union(imported)


def fetch_reference() -> Reference:
    return reference(wheels.mlx_metal().root / "mlx" / "include" / "metal_cpp")
