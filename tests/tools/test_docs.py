"""The documentation builds, its programs run, and what it names exists: files, commands, functions, an op's files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import torch_gdn

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "mps_simulator/README.md", *PAGES]
each_text = pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # One thread: a second process tests beside this one.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )


def need(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; pip install '.[dev]' --no-build-isolation brings it")


def test_builds_without_a_warning(tmp_path: Path) -> None:
    need("sphinx", "myst_parser", "furo", "transformers", "safetensors")
    finished = run("-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-d", f"{tmp_path}/trees",
                   str(DOCS), f"{tmp_path}/html")  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert {page.stem for page in PAGES} <= {page.stem for page in (tmp_path / "html").glob("*.html")}


def program(page: Path, language: str) -> str:
    """The page's blocks of this language, each on the page's own lines, for tracebacks."""
    lines, inside = [], False
    for line in page.read_text().split("\n"):
        fence = line.startswith("```")
        inside = line == f"```{language}" if fence else inside
        lines.append(line if inside and not fence else "")
    return "\n".join(lines).rstrip()


PROGRAMS = [page for page in PAGES if program(page, "python")]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_programs_run(page: Path, tmp_path: Path) -> None:
    if "transformers" in program(page, "python"):
        need("transformers")
    code = f"exec(compile({program(page, 'python')!r}, {str(page)!r}, 'exec'))"
    finished = run("-c", code, folder=tmp_path)
    assert finished.returncode == 0, finished.stderr


@each_text
def test_programs_that_need_a_download_compile(text: Path) -> None:
    compile(program(text, "py"), str(text), "exec")


def test_the_readme_is_short_and_in_order() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 180
    headings = re.findall(r"^## (.*)$", readme, flags=re.MULTILINE)
    order = [
        "Status",
        "Install",
        "Use",
        "With transformers",
        "With vLLM",
        "What it takes",
        "Speed",
        "Two commands",
        "More",
    ]
    assert headings == order
    assert readme.count("![") == 1


@each_text
def test_files_exist(text: Path) -> None:
    folders = "csrc|shaders|torch_gdn|mps_simulator|proof|tests|bench|examples|docs"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text.read_text()):
        assert (ROOT / path).exists(), path


@each_text
def test_commands_exist(text: Path) -> None:
    words, packages = text.read_text(), "torch_gdn|mps_simulator|bench|proof|tests|examples"
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", words, flags=re.MULTILINE)) <= targets
    for module in re.findall(rf"python -m ((?:{packages})[a-z_.]*)", words):
        root = ROOT / "mps_simulator/src" if module.startswith("mps_simulator") else ROOT
        path = root / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_reference_has_every_function() -> None:
    reference = (DOCS / "api.md").read_text()
    missing = [name for name in torch_gdn.__all__ if not re.search(rf"(?<!\w)(torch_gdn\.)?{name}(?!\w)", reference)]
    assert missing == ["__version__"]


# Files that call or list l2norm, as any op's callers do, but are none that an op needs.
CALLERS = re.compile(
    r"bench/|docs/|examples/|proof/|torch_gdn/(check/|tools/|integrations/|_recorder|warmup|reference/gdn)|tests/(?!helpers/calls\.py|layers/test_l2norm)"
    r"|.*gated_delta_rule\.|csrc/metal/gdn/launches|torch_gdn/ops/kda/|[^/]*$"
)


def test_adding_an_op_lists_the_files_of_the_example() -> None:
    listed = subprocess.run(
        ["git", "grep", "-lwE", "l2norm|L2Norm[A-Za-z]*"], cwd=ROOT, text=True, capture_output=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout (a source distribution, say): nothing to compare with")
    found = {path for path in listed.stdout.split() if not CALLERS.match(path)}
    page = (DOCS / "adding-an-op.md").read_text()
    tables = re.findall(r"(?:^\| `[^`]+` \| .*\n)+", page, flags=re.MULTILINE)
    written, edited = (set(re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)) for table in tables)
    assert written == {path for path in found if Path(path).stem.removeprefix("test_") == "l2norm"}
    assert edited == found - written
    included = set(re.findall(r"\{literalinclude\} \.\./(\S+)", page))
    assert included == {*written, "torch_gdn/reference/layers.py"}


def test_hooks_are_valid() -> None:
    need("pre_commit")
    finished = run("-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")
    assert finished.returncode == 0, finished.stdout + finished.stderr
