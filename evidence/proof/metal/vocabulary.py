"""Lists the words of Metal that our shaders use, and where each occurs in Metal that Apple's compiler is known to take.

That is the Metal in MLX's and PyTorch's public wheels, which ship compiled from it. `python -m evidence.proof --only
vocabulary --write` writes vocabulary.tsv. A word that is not in it fails the tests, and a word that no such source has
is refused. Only words and names of files are recorded.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evidence.proof.mac import wheels
from evidence.proof.metal.front_end import SHADERS, compile_strictly
from evidence.proof.metal.kernels import batches, source_of
from evidence.proof.metal.launches import compiled_at, probe_launches, variants
from evidence.proof.metal.tree import Node, Tree, body_of, callee, callee_name, read_tree, walk
from torch_gdn._recorder import KernelVariant
from torch_gdn_check import probes
from torch_gdn_check.registry import Point
from torch_gdn_check.registry.attention import PagePoint
from torch_gdn_check.registry.aura import AuraPoint, CodecPoint
from torch_gdn_check.registry.gdn import RulePoint, end_to_end, stages_at
from torch_gdn_check.registry.models import DTYPES, METAL_TYPES
from torch_gdn_check.registry.registry import computed

TABLE = Path(__file__).with_name("vocabulary.tsv")
BFLOAT16, _, FLOAT32 = DTYPES
HEADER = "kind\tword\toccurs in\n"
NAMED = 2  # files per project

# C++14 and the preprocessor, which every Metal compiler has, and `if constexpr`.
CPLUSPLUS = """
auto bool break case char const constexpr continue decltype default do else enum explicit false float for if inline int
long namespace operator private public return short signed sizeof static static_assert struct switch template true
typedef typename union unsigned using void volatile while
define defined elif endif error ifdef ifndef include line once pragma undef __FAST_MATH__ __LINE__ _Pragma clang
"""
COMPONENTS = "xyzw"  # a vector's components
# Metal's own qualifiers are words to look up like any other: device, constant, thread, threadgroup, kernel.

GENERATED_CALLS = ("threadgroup_variable", "constant_text", "argument", "__builtin_inff")  # the last is INFINITY
LEXICAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'', re.S)


@dataclass(frozen=True, order=True)
class Word:
    kind: str  # header, attribute, pragma, function or name
    text: str

    def pattern(self) -> re.Pattern[str]:
        text = re.escape(self.text)
        if self.kind == "header":
            return re.compile(rf"#\s*include\s*<{text}>")
        if self.kind == "attribute":
            return re.compile(rf"\[\[[^\]]*\b{text}\b")
        if self.kind == "pragma":
            return re.compile(re.sub(r"(\\ )+", r"\\s+", text))
        if self.kind == "function":
            return re.compile(rf"\b{text}\s*(?:<[^;{{}}()]*>)?\s*\(")
        return re.compile(rf"\b{text}\b")


def blanked(text: str) -> str:
    """Returns the text without comments and string literals."""
    return LEXICAL.sub(lambda match: " " * (0 if match[0].startswith("/") else 2), text)


def metal_blocks(text: str) -> str:
    """Returns the part of a header that Metal sees, if C++ reads the header as well."""
    kept: list[str] = []
    hidden: list[bool] = []
    for line in text.splitlines():
        directive = re.match(r"\s*#\s*(if|ifdef|ifndef|else|elif|endif)\b(.*)", line)
        if directive is None:
            kept.append("" if any(hidden) else line)
        elif directive[1].startswith("if"):
            hidden.append(directive[1] == "ifndef" and "__METAL__" in directive[2])
            kept.append(line)
        elif directive[1] == "endif":
            hidden.pop()
        elif directive[1] == "else":
            opening = next(each for each in reversed(kept) if re.match(r"\s*#\s*if", each))
            hidden[-1] = "__METAL__" in opening and not re.match(r"\s*#\s*ifndef", opening)
    return "\n".join(kept)


def _has_words_of_its_own(point: Point) -> bool:
    """Point is in float32: 80 and 96 multiply by Paley's matrices, 64 halves the keys, and 3 bits straddle words."""
    if not isinstance(point, CodecPoint | AuraPoint | PagePoint) or point.dtype != FLOAT32:
        return False
    sizes = (80, 128, 256) if isinstance(point, PagePoint) else (64, 80, 96)
    return point.D in sizes and point.bits in (3, (3, 3), (3, 4))


def trees_of_kernels() -> list[Tree]:
    """Returns one instance of each kernel. Recurrent ones have both layouts and both decays, since each omits code."""
    rule = RulePoint(BFLOAT16, normalise=True, tokens=2)
    rules = [replace(rule, state_v_first=not channels, channels=channels) for channels in (True, False)]
    others = (each for each in compiled_at(CodecPoint, AuraPoint, PagePoint) if _has_words_of_its_own(each[1]))
    wanted = itertools.chain(*map(end_to_end, rules), stages_at(rules), computed(quick=True), others)
    result = [*variants(wanted), *(launch.variant for launch in probe_launches())]
    return trees_of(result)


def trees_of(kernels: Sequence[KernelVariant]) -> list[Tree]:
    return [read_tree(*compile_strictly(source_of(batch))) for batch in batches(kernels)]


def _declared(trees: Iterable[Tree]) -> set[str]:
    names = set()
    for tree in trees:
        names |= {str(node["name"]) for node in tree.everything() if node["kind"].endswith("Decl") and "name" in node}
    return names


def _library_calls(trees: Iterable[Tree]) -> set[str]:
    """Returns functions of Metal's library that are called, whatever else has their names."""
    names = set()
    for tree in trees:
        written = (function for function in tree.functions.values() if not function.get("isImplicit"))
        calls = (node for function in written for node in walk(_body(function)))
        for call in calls:
            if call["kind"] in ("CallExpr", "CXXMemberCallExpr") and tree.function(callee(call)) is None:
                names.add(callee_name(call))
    return {name for name in names if name.isidentifier() and name not in GENERATED_CALLS}


def _body(function: Node) -> Node:
    body = body_of(function)
    assert body is not None
    return body


def words(trees: Sequence[Tree]) -> set[Word]:
    """Returns the words of all files in shaders/. The trees tell which of them are functions of Metal's."""
    result = {Word("function", name) for name in _library_calls(trees)}
    paths = sorted(path for folder in (SHADERS, probes.SHADERS) for path in folder.rglob("*"))
    texts = [metal_blocks(path.read_text()) for path in paths if path.suffix in (".metal", ".h")]
    macros = {name for text in texts for name in re.findall(r"#\s*define\s+(\w+)", text)}
    known = {*_declared(trees), *CPLUSPLUS.split(), *COMPONENTS, *macros, *(word.text for word in result)}
    for text in texts:
        result |= {Word("header", name) for name in re.findall(r"#\s*include\s*<(\w+)>", text)}
        result |= {Word("pragma", pragma) for pragma in re.findall(r'_Pragma\("(.*?)"\)', text)}
        code = re.sub(r"#\s*include[^\n]*", "", blanked(text))
        for attributes in re.findall(r"\[\[(.*?)\]\]", code):
            while "(" in attributes:  # its argument is our own expression
                attributes = re.sub(r"\([^()]*\)", "", attributes)
            result |= {Word("attribute", name) for name in re.findall(r"[a-z_]\w*", attributes)}
        code = re.sub(r"\[\[.*?\]\]", "", code)
        code = re.sub(r"\b0x[\da-fA-F]+\w*|\b\d[\w.]*", "", code)
        result |= {Word("name", name) for name in re.findall(r"[A-Za-z_]\w*", code) if name not in known}
    # The host's appended line has these.
    return result | {Word("attribute", "host_name")} | {Word("name", name) for name in METAL_TYPES.values()}


@dataclass(frozen=True)
class Project:
    """Other people's Metal source that is known to compile."""

    name: str
    version: str
    root: Path
    files: tuple[Path, ...]

    def relative(self, path: Path) -> str:
        return f"{self.name}/{path.relative_to(self.root)}"


def _installed(package: str) -> tuple[str, Path] | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return importlib.metadata.version(package), Path(next(iter(spec.submodule_search_locations)))


# MLX gives bfloat the library's functions here, so these names prove nothing.
OWN_DEFINITIONS = ("bf16_math.h",)


def _headers(*folders: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for folder in folders for path in folder.rglob("*.h")))


def mlx() -> Project:
    """Returns the installed package, which has the Metal sources on every system, or else fetches the macOS wheel."""
    installed = _installed("mlx")
    if installed and (installed[1] / "include/mlx/backend/metal/kernels").is_dir():
        version, root = installed
    else:
        wheel = wheels.mlx_metal()
        version, root = wheel.version, wheel.root / "mlx"
    kernels = root / "include/mlx/backend/metal/kernels"
    return Project("mlx", version, kernels, _headers(kernels))


def torch() -> Project:
    installed = _installed("torch")
    assert installed is not None, "torch_gdn cannot be imported without torch"
    include = installed[1] / "include"
    folders = (include / "c10/metal", include / "ATen/native/mps/kernels")
    return Project("torch", installed[0].split("+")[0], include, _headers(*folders))


def projects() -> list[Project]:
    return [mlx(), torch()]


def sources(wanted: Iterable[Word], projects: Sequence[Project]) -> dict[Word, list[str]]:
    """Returns the first files of each project in which a word occurs."""
    texts = {path: path.read_text(errors="replace") for project in projects for path in project.files}
    code = {path: blanked(text) for path, text in texts.items()}
    result: dict[Word, list[str]] = {}
    for word in sorted(wanted):
        pattern, where = word.pattern(), texts if word.kind == "pragma" else code
        result[word] = []
        for project in projects:
            files = (path for path in project.files if path.name not in OWN_DEFINITIONS)
            matching = (project.relative(path) for path in files if pattern.search(where[path]))
            result[word] += itertools.islice(matching, NAMED)
    return result


def table_text(named: dict[Word, list[str]]) -> str:
    rows = (f"{word.kind}\t{word.text}\t{' '.join(files)}\n" for word, files in sorted(named.items()) if files)
    return HEADER + "".join(rows)


def read_table() -> dict[Word, list[str]]:
    rows = (line.split("\t") for line in TABLE.read_text().splitlines()[1:])
    return {Word(kind, text): files.split(" ") for kind, text, files in rows}
