"""Mutants that nobody chose: the rules in evidence/proof/mutate/rules/, applied to every line of the sources."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

from evidence.proof.mutate.faults import CHECKOUT, TABLES, Fault, read_table, tests_of
from evidence.proof.mutate.scratch import included_shaders

T = TypeVar("T")
RULES = Path(__file__).parent / "rules"
DRAWN = "drawn"  # their kind of fault
CLASSES = "tests/properties"
FAMILIES = ("attention", "aura", "experts", "gdn", "kda", "layers", "quantized")  # folders of the tests of ops
FOLDERS = ("tests", "check/tests", "engines/tests")  # of the tests of the product that `make test` runs
MOST = 4  # files of tests that a mutant of a shader or a module runs because of their names or texts
MOST_OPS = 12  # of the files that include a header; the tests that claim it are enough for a header of more ops


@dataclass(frozen=True)
class Source:
    """A folder of sources, and how many mutants of a round come from it."""

    folder: str
    suffixes: tuple[str, ...]
    rules: str
    share: int
    left_out: tuple[str, ...] = ()


SGLANG = "engines/torch_gdn_engines/sglang"
# The tests of vLLM's plugin and of most modules of SGLang's need the engines. A mutant of csrc/ takes a build.
SOURCES = (
    Source("shaders", (".metal", ".h"), "c.rules", 4),
    Source("torch_gdn", (".py",), "python.rules", 3),
    Source(
        SGLANG, (".py",), "python.rules", 1,
        tuple(f"{SGLANG}/{module}.py" for module in ("attention", "hooks", "quantized", "warmup")),
    ),
    Source("csrc", (".cpp", ".h", ".mm"), "c.rules", 1),
)  # fmt: skip


# A feature's files have one of these words in their paths.
FEATURES = {
    "experts": ("experts", "moe_"),
    "quantized": ("quantized", "packed", "loading_patches"),
    "attention": ("attention",),
    "aura": ("aura",),
    "sglang": ("sglang", "serving.py"),
}


def files_of(source: Source) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", source.folder], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.splitlines() if name.endswith(source.suffixes)]
    return [name for name in names if not name.startswith(source.left_out)] if source.left_out else names


@dataclass(frozen=True)
class Rules:
    """The rules of a file, which has `PATTERN ==> REPLACEMENT` on each line.

    The replacement DO_NOT_MUTATE leaves out lines that have the pattern, and SKIP_MUTATING_REST what follows it.
    """

    replacements: tuple[tuple[re.Pattern[str], str], ...]
    lines_left_out: tuple[re.Pattern[str], ...]
    ends: tuple[re.Pattern[str], ...]

    @staticmethod
    @cache
    def read(name: str) -> Rules:
        lines = (line for line in (RULES / name).read_text().splitlines() if not line.startswith("#"))
        pairs = [line.split(" ==> ", 1) for line in lines if " ==> " in line]
        rules = [(re.compile(pattern), replacement) for pattern, replacement in pairs]
        special = {"DO_NOT_MUTATE", "SKIP_MUTATING_REST"}
        return Rules(
            tuple((pattern, replacement) for pattern, replacement in rules if replacement not in special),
            tuple(pattern for pattern, replacement in rules if replacement == "DO_NOT_MUTATE"),
            tuple(pattern for pattern, replacement in rules if replacement == "SKIP_MUTATING_REST"),
        )

    def mutants(self, line: str) -> Iterator[str]:
        """Yields the line with one match of one rule replaced, outside texts."""
        if any(pattern.search(line) for pattern in self.lines_left_out):
            return
        end = min((result.start() for pattern in self.ends if (result := pattern.search(line))), default=len(line))
        for pattern, replacement in self.replacements:
            for match in pattern.finditer(line):
                is_in_a_text = line.count('"', 0, match.start()) % 2 == 1
                if match.start() < end and not is_in_a_text:
                    expanded = match.expand(replacement.replace("\\n", "\n"))
                    yield line[: match.start()] + expanded + line[match.end() :]


def lines_of(file: str, rules: str) -> Iterator[tuple[int, str, str]]:
    """Yields the number of a line, the line, and a mutant of it."""
    for number, line in enumerate((CHECKOUT / file).read_text().splitlines(keepends=True), 1):
        for mutant in Rules.read(rules).mutants(line):
            yield number, line, mutant if mutant.endswith("\n") else mutant + "\n"


def means_something_else(fault: Fault) -> bool:
    """Returns whether a mutant of Python is valid, and differs in more than texts and annotations."""
    if fault.part != "python":
        return True
    source = (CHECKOUT / fault.file).read_text()
    try:
        return without_texts(source) != without_texts(fault.plant(source))
    except SyntaxError:
        return False


def without_texts(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, None)
    return ast.dump(tree)


def fault_of(file: str, number: int, line: str, mutant: str) -> Fault:
    """Returns a fault whose text is the line, and as many lines before it as make it occur once."""
    lines = (CHECKOUT / file).read_text().splitlines(keepends=True)
    first = number - 1
    while first > 0 and "".join(lines).count("".join(lines[first:number])) > 1:
        first -= 1
    before = "".join(lines[first : number - 1])
    name = f"{file}:{number}: {line.strip()} -> {mutant.strip()}"
    part = "python" if file.endswith(".py") else "shaders" if file.startswith("shaders/") else file.split("/")[1]
    part = part if part in ("python", "shaders", "metal", "ops", "cpu") else "ops"
    tests, words = tests_that_see(file, definition_at(file, number))
    return Fault(name, DRAWN, part, file, before + line, before + mutant, tests, words)


@cache
def tests_that_see(file: str, definition: str = "") -> tuple[tuple[str, ...], str]:
    """Returns files of tests, and what their names must have. The classes' tests run only the file's ops."""
    if file.endswith(".py"):
        return tests_of_module(file, definition), ""
    is_shader = file.startswith("shaders/")
    ops = ops_of_shaders().get(file, []) if is_shader else ops_of_source(file)
    of_ops = [*dict.fromkeys(test for op in ops for test in tests_of_op(op))]
    claimed = tests_of(file, read_table(TABLES / "tests.toml"), CHECKOUT)
    files = dict.fromkeys([*claimed, *(of_ops[:MOST] if is_shader else of_ops)])
    words = dict.fromkeys([*(Path(each).stem for each in files), *ops])
    return (*files, *([CLASSES] if ops else [])), " or ".join(words)


@cache
def tests_of_op(op: str) -> tuple[str, ...]:
    """Returns the files of tests with the op's name, or else the file that names it most often, and those of gradients
    for an op that computes them.
    """
    name = op.rstrip("_")
    if own := sorted(CHECKOUT.glob(f"tests/*/test_{name}.py")):
        return tuple(str(path.relative_to(CHECKOUT)) for path in own)
    texts = {path: path.read_text() for family in FAMILIES for path in tests_in(CHECKOUT / "tests" / family)}
    naming = {path: len(re.findall(rf"\b{name}_?\b", text)) for path, text in texts.items()}
    most = max(naming, key=naming.__getitem__)
    others = [most] if naming[most] else []
    others += [path for path in texts if "bwd" in name and path.stem == "test_gradients"]
    return tuple(str(path.relative_to(CHECKOUT)) for path in others)


def ops_of_source(file: str) -> list[str]:
    """Returns the ops whose contracts a file of csrc/ names, or else those that the users of its header name.

    A file of csrc/cpu/simd/ names none, but may have the name of one.
    """
    header = Path(file).with_suffix(".h").relative_to("csrc")
    users = [path for path in (CHECKOUT / "csrc").rglob("*.[chm]*") if f'#include "{header}"' in path.read_text()]
    used = ops_named(*users)
    return ops_named(CHECKOUT / file) or (used if len(used) <= MOST_OPS else []) or ops_at(Path(file).stem)


def ops_named(*paths: Path) -> list[str]:
    texts = [path.read_text() for path in paths]
    return [op for contract, op in contracts().items() if any(re.search(rf"\b{contract}\b", text) for text in texts)]


@cache
def contracts() -> dict[str, str]:
    """Returns the op of each contract, which is a struct with a schema."""
    schema = re.compile(r'^struct (\w+)[^;{]*\{\s+static constexpr const char\* kSchema =\s+"(\w+)', re.MULTILINE)
    headers = sorted((CHECKOUT / "csrc" / "ops").rglob("*.h"))
    return {contract: op for path in headers for contract, op in schema.findall(path.read_text())}


def ops_at(stem: str) -> list[str]:
    return [op for op in contracts().values() if op.rstrip("_") == stem]


@cache
def ops_of_shaders() -> dict[str, list[str]]:
    """Returns the ops that launch a kernel of a file, or of a file that includes it, by the registry's points."""
    import mps_simulator
    from torch_gdn_check.fake_mps import fake_mps
    from torch_gdn_check.registry.registry import computed, launches_at

    mps_simulator.activate()
    result: dict[str, dict[str, None]] = {}
    for entry, point in computed(quick=False):
        for file in {f"shaders/{launch.variant.file}" for launch in launches_at(entry, point, fake_mps())}:
            result.setdefault(file, {})[entry.name] = None
    for file, ops in [*result.items()]:
        for header in included_shaders(CHECKOUT, [CHECKOUT / file]):
            result.setdefault(str(header.relative_to(CHECKOUT)), {}).update(ops)
    return {file: list(ops) for file, ops in result.items()}


@cache
def definitions_in(file: str) -> dict[str, range]:
    """Returns the lines of each function and class of a module that are in no other."""
    tree = ast.parse((CHECKOUT / file).read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in nodes}


def definition_at(file: str, number: int) -> str:
    if not file.endswith(".py"):
        return ""
    return next((name for name, lines in definitions_in(file).items() if number in lines), "")


def tests_of_module(file: str, definition: str = "") -> tuple[str, ...]:
    """Returns the files of tests that are named after what a mutant is in, those that claim its module, and those that
    name the most of the module. A name that few files have counts more, and the name of what the mutant is in counts
    most.
    """
    claims = read_table(TABLES / "tests.toml")
    names = (definition.rstrip("_"), Path(file).stem, f"{Path(file).parent.name}_{Path(file).stem}")
    paths = [path for name in names for path in sorted(CHECKOUT.glob(f"tests/*/test_{name}.py"))]
    own = [str(path.relative_to(CHECKOUT)) for path in paths]
    own += next((tests for pattern, tests in claims.items() if fnmatch.fnmatch(file, pattern)), [])
    package, _, module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    imports = rf"\b{re.escape(package)}\.{module}\b|\bfrom {re.escape(package)} import .*\b{module}\b"
    texts = {
        str(path.relative_to(CHECKOUT)): path.read_text() for folder in FOLDERS for path in tests_in(CHECKOUT / folder)
    }
    scores = dict.fromkeys(texts, 0.0)
    for name in [name for name in definitions_in(file) if not name.startswith("_") and len(name) > 3]:
        naming = [test for test, text in texts.items() if re.search(rf"\b{name}\b", text)]
        for test in naming:
            scores[test] += (6 if name == definition else 3) / len(naming)
    for test, text in texts.items():
        scores[test] += 3 * (re.search(imports, text) is not None)
        scores[test] += 3 * (Path(file).stem in Path(test).stem and Path(file).parent.name in test)
    ranked = sorted(texts, key=lambda test: -scores[test])
    best = [test for test in ranked if scores[test] >= 1] or ranked[:1]
    return tuple(dict.fromkeys([*own, *best]))[:MOST]


def tests_in(folder: Path) -> list[Path]:
    """Returns files of tests, without those that need a separate environment or test the proof."""
    others = ("vllm", "sglang", "proof")
    return [path for path in sorted(folder.rglob("test_*.py")) if path.parent.name not in others]


def all_mutants(source: Source, words: Sequence[str]) -> list[tuple[str, int, str, str]]:
    """Returns the mutants of the files that have one of the words in their paths."""
    files = [file for file in files_of(source) if any(word in file for word in words)]
    return [(file, *each) for file in files for each in lines_of(file, source.rules)]


def place_of(mutant: tuple[str, int, str, str], seed: str) -> bytes:
    file, _, line, replacement = mutant
    return hashlib.sha256(f"{seed} {file} {line} {replacement}".encode()).digest()


def iter_pop(pile: list[T]) -> Iterator[T]:
    while pile:
        yield pile.pop()


def draw(count: int, seed: str, sources: Sequence[Source] = SOURCES, features: Sequence[str] = ()) -> list[Fault]:
    """Draws mutants of all folders in turn. A larger count begins with those of a smaller one.

    With features, it draws from their files alone.

    A change to the sources draws the same mutants of the lines that it leaves.
    """
    words = tuple(word for feature in features for word in FEATURES[feature]) or ("",)
    piles = [sorted(all_mutants(source, words), key=lambda x: place_of(x, seed)) for source in sources]
    chosen: list[Fault] = []
    while len(chosen) < count and any(piles):
        for source, pile in zip(sources, piles, strict=True):
            drawn = (fault for each in iter_pop(pile) if means_something_else(fault := fault_of(*each)))
            chosen += islice(drawn, source.share)
    return chosen[:count]
