"""Tests that the documentation's programs run, and what it names exists: files, commands, functions, ops' files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import torch_gdn
from tests.helpers import pages
from torch_gdn.integrations.transformers import versions
from torch_gdn.integrations.transformers.patches import CONVOLVING_MODELS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "mps_simulator/README.md", *PAGES]
each_text = pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # One thread, because a second process tests at the same time.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )


def need(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; pip install -e '.[dev]' --no-build-isolation brings it")


def program(page: Path, *languages: str) -> str:
    """Returns the page's blocks of these languages, each on the page's own lines, for tracebacks."""
    lines, inside = [], False
    for line in page.read_text().split("\n"):
        fence = line.startswith("```")
        inside = line.removeprefix("```") in languages if fence else inside
        lines.append(line if inside and not fence else "")
    return "\n".join(lines).rstrip()


PROGRAMS = [page for page in (ROOT / "README.md", *PAGES) if program(page, "python", "py")]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_programs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block marked `py` downloads a model and a tokenizer, and gets small ones here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a second process tests at the same time
    code = program(page, "python", "py")
    if "transformers" in code:
        need("transformers")
    assert pages.run(code, page, tmp_path, small_downloads=bool(program(page, "py"))) == ""
    if page.name == "README.md":  # the page shows the line of status(), and the lists of tokens mean nothing
        shown = [line for line in (tmp_path / "stdout.txt").read_text().splitlines() if not line.startswith("[")]
        assert len(shown) == 1 and f"\n    {shown[0]}\n" in page.read_text()


FOR_USERS = "install quickstart transformers serve vllm sglang transformers-serving models aura migrate troubleshooting"
FOR_USERS += " environment tools serving how-it-works why index compare faq gallery several-macs finetune"


def test_a_user_can_read_all_of_it() -> None:
    texts = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in FOR_USERS.split())]
    # A word has a letter. Programs count, but numbers and the markup of tables do not.
    counts = {text.stem: len(re.findall(r"\S*[A-Za-z]\S*", text.read_text())) for text in texts}
    (limit,) = re.findall(r"pages for users have at most ([\d,]+) words", (ROOT / "CONTRIBUTING.md").read_text())
    assert sum(counts.values()) <= int(limit.replace(",", "")), counts


def test_troubleshooting_quotes_messages_that_exist() -> None:
    modules = (path for folder in ("torch_gdn", "engines") for path in (ROOT / folder).rglob("*.py"))
    files = [ROOT / "setup.py", *modules, *(ROOT / "csrc/ops").rglob("*.cpp")]
    sources = re.sub(r'"\n\s*f?"', "", "\n".join(file.read_text() for file in files))  # joins a literal over two lines
    quoted = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(quoted) > 10
    parts = {part.strip() for message in quoted for part in re.split(r"\.\.\.|\d[\d.]*\d", message)}
    assert {part for part in parts if part not in sources} <= {")"}


@each_text
def test_files_exist(text: Path) -> None:
    folders = "csrc|shaders|torch_gdn|check|engines|evidence|mps_simulator|tests|bench|examples|docs"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text.read_text()):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text.read_text()):
        assert (text.parent / path).exists(), path


def test_variables_and_options_exist() -> None:
    """Options of an engine, which its pages name, are tested in the engine's environment."""
    words = "\n".join(
        text.read_text() for text in TEXTS if text.stem not in ("vllm", "plugins", "several-macs", "sglang")
    )
    named = set(re.findall(r"(?<![\w-])(?:(?:TORCH_GDN|MPS_SIMULATOR)_[A-Z_]+|--[a-z][a-z-]+)", words))
    git = ["git", "grep", "-hoEe", "|".join(rf"{each}\b" for each in named), "--", ":!*.md", ":!*/test_*.py"]
    sources = subprocess.check_output(git, cwd=ROOT, text=True)
    assert len(named) > 25
    assert named - set(sources.split()) == set()


@each_text
def test_commands_exist(text: Path) -> None:
    words, packages = text.read_text(), "torch_gdn|mps_simulator|bench|evidence|tests|examples"
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", words, flags=re.MULTILINE)) <= targets
    for module in re.findall(rf"python -m ((?:{packages})[a-z_.]*)", words):
        root = ROOT / "mps_simulator/src" if module.startswith("mps_simulator") else ROOT
        path = root / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_reference_has_every_function() -> None:
    reference = re.sub(r"(?s)## All functions\n.*?(?=\n## )", "", (DOCS / "api.md").read_text())  # without the table
    missing = [name for name in torch_gdn.__all__ if not re.search(rf"(?<!\w)(torch_gdn\.)?{name}(?!\w)", reference)]
    assert missing == ["__version__"]


def test_pages_agree_on_launches() -> None:
    """launches.json has what a test counts with torch_gdn in transformers, and test_launches.py in vLLM."""
    counted = json.loads((ROOT / "tests/integrations/launches.json").read_text())
    starts = {"Gated DeltaNet of": "gated delta net", "attention of": "full layers: attention"}
    starts |= {"norms and residuals": "linear layers: norms", "mixture of experts": "linear layers: experts"}
    page, readme = (DOCS / "transformers.md").read_text(), (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| (.*?) \| (\d+ \| \d+).* \|$", page, flags=re.MULTILINE))
    for title, row in rows.items():
        for start, part in starts.items():
            for model in re.findall(r"Qwen3[\w.-]*", title) or ["Qwen3-Next"] if title.startswith(start) else []:
                (name,) = (name for name in counted if name.startswith(f"{model}-") and "B-A" in name)
                (operators,) = (each for key, each in counted[name]["decode"].items() if part in key)
                assert row.endswith(f"| {sum(operators.values())}"), title
                assert part != "gated delta net" or operators["mm"] == {"Qwen3-Next": 3, "Qwen3.5": 5}[model], title
    ours, theirs = re.findall(r"(\d+) kernel launches per decoded token instead of (\d+)", readme)[0]
    assert rows["Gated DeltaNet of Qwen3-Next"] == f"{theirs} | {ours}"
    ours, theirs = re.findall(r"experts in (\d+) launches instead of (\d+)", (DOCS / "faq.md").read_text())[0]
    assert len(rows) >= 9 and rows["mixture of experts, whole block"] == f"{theirs} | {ours}"
    both = page + (DOCS / "transformers-serving.md").read_text()
    models = re.findall(r"^\| ([A-Z]\S+B\S*) \| (\d+) \| [\d |]+$", both, flags=re.MULTILINE)
    for name, launches in models:
        parts = counted[name]["decode"].items()
        layers = {part: int(part.split()[0]) if part[0].isdigit() else 1 for part, _ in parts}
        assert int(launches) == sum(layers[part] * sum(each.values()) for part, each in parts), name
    in_vllm = re.findall(r'"(Qwen\S+)": \(\w+, (\d+)\)', (ROOT / "engines/tests/vllm/test_launches.py").read_text())
    assert (len(models), len(in_vllm)) == (6, 3)
    assert all(f"| {name} | {launches} |\n" in (DOCS / "vllm.md").read_text() for name, launches in in_vllm)


def test_pages_agree_on_models_and_versions() -> None:
    page, changes = (DOCS / "transformers.md").read_text(), (ROOT / "CHANGELOG.md").read_text()
    convolving = re.sub(r" \(.*?\)", "", re.findall(r"\n\| (.*) \| short convolutions \|", page)[0]).split(", ")
    kinds = {re.sub("moehybrid|_moe|_loop|_", "", kind) for kind in CONVOLVING_MODELS}
    assert {re.sub("[ -]", "", name).lower() for name in convolving} == kinds
    assert f"In {len(convolving)} other models, the short convolutions" in changes
    models = re.findall(r"^\| ([A-Z][^|]*?) \| (?:Gated|the same|as Qwen|Kimi)", page, flags=re.MULTILINE)
    assert all(name in changes for name in ", ".join(models).replace(", dense and with experts", "").split(", "))
    assert f"\n| feature | {' | '.join(versions.TESTED)} |\n" in page and len(models) == 6
    assert f"transformers {' or '.join(versions.SERVED)}" in (DOCS / "models.md").read_text()


def test_pages_agree_on_the_memory_of_a_cache() -> None:
    """aura.md has a row per scheme, which begins with the bits per value; float16 has 16."""
    page = (DOCS / "aura.md").read_text()
    bits = {name: float(each) for name, each in re.findall(r"^\| (\d\w+) \| ([\d.]+) \|", page, flags=re.MULTILINE)}
    (default,) = re.findall(r"The default is `(\w+)`", page)
    share, largest, smallest = 16 / bits[default], 16 / max(bits.values()), 16 / min(bits.values())
    assert len(bits) > 5 and f"in 1/{largest:.1f} to\n1/{smallest:.0f}. " in page
    for text in (page, *((ROOT / name).read_text() for name in ("README.md", "docs/pictures/hybrid.svg"))):
        assert f"about 1/{share:.1f} of " in text


def test_the_losses_of_aura_are_the_measured_ones() -> None:
    """Those of docs/lab/cache-formats.md, rounded. A test compares that page with the records."""
    page, lab = (DOCS / "aura.md").read_text(), (DOCS / "lab/cache-formats.md").read_text()
    lines = (map(str.strip, line.split("|")) for line in re.findall(r"^\| AURA (.*)\|$", lab, flags=re.MULTILINE))
    measured = {name: cells for name, *cells in lines}
    rows = re.findall(r"^\| (\dv\dt?) \| (.*) \|$", page, flags=re.MULTILINE)
    for scheme, row in rows:
        exact = measured[f"{scheme}, tail 128{'' if scheme.endswith('t') else ', means'}"]
        for cell, column in zip(row.split(" | "), (1, 2, 3, 5, 8), strict=True):
            assert cell == f"{float(exact[column]):.{len(cell.partition('.')[2])}f}", scheme
    steps = [measured[name] for name in ("4v4", "4v4, tail 128", "4v4t, tail 128, no means", "4v4t, tail 128")]
    lowered = [("4.50", steps[0][3])]
    lowered += [(f"{float(b[1]) - float(a[1]):+.2f}".replace("+0.00", "0"), b[3]) for a, b in pairwise(steps)]
    assert len(rows) == 7 and lowered == re.findall(r"\| ([+\d.]+) \| ([\d.]+) \|\n", page.partition("Three things")[2])
    decoded = (
        f"{measured['4v4t, tail 128, earlier means'][3]} instead of {steps[3][3]}. It is {steps[2][3]} without means"
    )
    assert decoded in " ".join((DOCS / "vllm.md").read_text().split())


def test_the_readme_has_the_measured_times() -> None:
    page, readme = (DOCS / "lab/benchmarks.md").read_text(), (ROOT / "README.md").read_text()
    for dtype in ("float32", "bfloat16"):
        ratios = rf"^\| (?:prefill|decode) \| {dtype} \| transformers \| [\d.]+ \| [\d,]+ \| ([\d.]+) \|"
        prompt, token = re.findall(ratios, page, flags=re.MULTILINE)
        assert f"| {dtype} | {prompt} times as fast | {token} times as fast |" in readme


RECORDED = re.compile(r".*\.tsv$|CHANGELOG\.md$|docs/adding-an-op\.md$|evidence/proof/mutate/faults/")


def test_adding_an_op_lists_the_files_of_the_example() -> None:
    page = (DOCS / "adding-an-op.md").read_text()
    example = re.findall(r"A worked example: `(\w+)`", page)[0]
    words = f"{example}|{example.title().replace('_', '')}[A-Za-z]*"
    listed = subprocess.run(["git", "grep", "-lwE", words], cwd=ROOT, text=True, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout (a source distribution, say): nothing to compare with")
    result = {path for path in listed.stdout.split() if not RECORDED.match(path)}
    tables = re.findall(r"(?:^\| `[^`]+` \| .*\n)+", page, flags=re.MULTILINE)
    written, edited, calling = (set(re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)) for table in tables)
    assert written == {path for path in result if Path(path).stem.removeprefix("test_") == example}
    assert edited | calling == result - written
    included = set(re.findall(r"\{literalinclude\} \.\./(\S+)", page))
    families = ("torch_gdn/ops", "torch_gdn/reference", "check/torch_gdn_check/registry")
    assert included == written | {f"{folder}/layers.py" for folder in families}


def test_hooks_are_valid() -> None:
    need("pre_commit")
    finished = run("-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_hooks_check_what_make_lint_checks() -> None:
    """Both name folders, so a moved folder must move in both."""
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for hook in settings["repos"][0]["hooks"]}
    makefile = (ROOT / "Makefile").read_text()
    for hook, variable, file in (("clang-format", "CXX_FILES", "x.h"), ("codespell-phrases", "SOURCES", "x.py")):
        (folders,) = re.findall(rf"^{variable} :?= (?:\$\(shell find )?([\w/. ]+)", makefile, flags=re.MULTILINE)
        for name in folders.split():
            if name != "setup.py":
                assert (ROOT / name).is_dir()
                assert re.match(hooks[hook]["files"], f"{name}/{file}"), (hook, name)
    (pages,) = re.findall(r"^PAGES := (.*)", makefile, flags=re.MULTILINE)
    for name in pages.split():
        page = name if name.endswith(".md") else f"{name}/x.md"
        assert re.match(hooks["codespell-phrases"]["files"], page), page
