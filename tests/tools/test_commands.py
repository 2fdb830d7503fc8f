"""Tests python -m torch_gdn COMMAND: the commands, their help, their messages, and the servers that `serve` starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_gdn.integrations.transformers.__main__ as transformers_serve
from torch_gdn import __main__ as command
from torch_gdn import __version__
from torch_gdn.command_line import COMMANDS, ENGINES, USAGE
from torch_gdn.integrations import draining
from torch_gdn.tools import serve

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOT_IMPORTED = 'import os\nos.write(2, b"PyTorch was imported")\nos._exit(3)\n'
NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"


def without_torch(folder: Path, torch: str, *arguments: str) -> tuple[int, str, str]:
    """Runs Python where `import torch` runs the code `torch`. Returns the exit status, stdout and stderr."""
    (folder / "torch.py").write_text(torch)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{DOCS.parent}"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_help_comes_without_pytorch(tmp_path: Path) -> None:
    status, listed, errors = without_torch(tmp_path, NOT_IMPORTED, "-m", "torch_gdn")
    page = (DOCS / "tools.md").read_text()
    assert (status, errors) == (0, "")
    for name in COMMANDS:
        assert f"python -m torch_gdn {USAGE.get(name, name)}  " in listed and f"## {name}\n" in page
        status, printed, errors = without_torch(tmp_path, NOT_IMPORTED, "-m", "torch_gdn", name, "--help")
        assert (status, errors) == (0, "") and printed.startswith(f"usage: python -m torch_gdn {name} ")


def test_the_version_comes_without_pytorch(tmp_path: Path) -> None:
    done = without_torch(tmp_path, NOT_IMPORTED, "-X", "faulthandler", "-m", "torch_gdn", "--version")
    assert done == (0, f"torch_gdn {__version__}\n", "")


def test_a_wrong_argument_is_an_error_without_pytorch(tmp_path: Path) -> None:
    for given in ("inof", "fits model --tokens 0"):
        status, printed, errors = without_torch(tmp_path, NOT_IMPORTED, "-m", "torch_gdn", *given.split())
        assert (status, printed) == (2, "") and errors.startswith("usage: python -m torch_gdn "), errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "torch_gdn", "info"],
        ["-m", "torch_gdn.tools.info", "--help"],
        ["-m", "other", "--version"],
        ["-c", "import torch_gdn", "--version"],
    ],
    ids=str,
)
def test_everything_else_imports_it(arguments: list[str], tmp_path: Path) -> None:
    """The arguments of another program are its own, even if they look like ours."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text("import torch_gdn")
    assert without_torch(tmp_path, NOT_IMPORTED, *arguments) == (3, "", "PyTorch was imported")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("inof", "COMMAND: expected info, check, tune, fits, expect, serve, got 'inof'; did you mean info?"),
        ("fit x", "got 'fit'; did you mean fits?"),
        ("zzz", "got 'zzz'\n"),
        ("warmup", "warmup is a function, not a command"),
        ("--verison", "unrecognized arguments: --verison"),
        ("info --json x", "info: error: unrecognized arguments: --json x"),
        ("fits", "fits: error: one of the arguments MODEL --table is required"),
        ("fits model --tokens 0", "fits: error: argument --tokens: expected a positive integer, got '0'"),
        ("fits model --requests -1", "expected a positive integer, got '-1'"),
        ("fits model --machines 128", "expected the GB of two or more machines, such as 128,64, got '128'"),
        ("fits ./missing", "expected a name on the Hub, a config.json or a folder that has one, got './missing'"),
        ("fits a/b/c", "or a folder that has one, got 'a/b/c'"),
        (f"fits {DOCS}", f"or a folder that has one, got '{DOCS}'"),
        ("tune --shapes 16,32,128", "expected H,HV,K,V, such as 16,32,128,128, got '16,32,128'"),
        ("tune --tokens 0", "expected a positive integer, got '0'"),
        ("tune --dtype float64", "invalid choice: 'float64'"),
        ("tune --rules mamba", "invalid choice: 'mamba'"),
        ("check --only (", "argument --only: expected a regular expression, got '('"),
        ("check --golden missing", "argument --golden: expected a folder, got 'missing'"),
        ("check --shaders missing", "argument --shaders: expected a folder, got 'missing'"),
        ("check --json missing/x.json", "argument --json: expected a file in a folder that exists"),
        ("expect", "expect: error: the following arguments are required: MODEL\n"),
        (
            "expect Qwen3.5-9B --mac M9",
            "expected a chip, and perhaps its GB of memory, such as \"M4 Max 128\", got 'M9'",
        ),
        ("expect Qwen3.5-9B --mac M4Max", "Known chips: M1, M1 Pro, M1 Max, M1 Ultra, M2, "),
        ("serve", "serve: error: the following arguments are required: MODEL\n"),
        ("serve --engine mlx model", "argument --engine: invalid choice: 'mlx'"),
    ],
)
def test_a_wrong_argument_is_named(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(given.split())
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "") and words in printed.err, printed.err


def test_without_pytorch_the_error_says_what_to_install(tmp_path: Path) -> None:
    status, _, errors = without_torch(tmp_path, NO_TORCH, "-m", "torch_gdn", "info")
    last = errors.strip().splitlines()[-1]
    assert status == 1 and "torch_gdn: PyTorch is not installed in this environment" in last
    assert "pip install torch==" in last and "No module named 'torch'" not in errors


def test_a_module_that_pytorch_lacks_is_named(tmp_path: Path) -> None:
    broken = "raise ModuleNotFoundError(\"No module named 'sympy'\", name='sympy')\n"
    assert "No module named 'sympy'" in without_torch(tmp_path, broken, "-c", "import torch_gdn")[2]


def test_every_text_names_commands_as_the_page_does() -> None:
    """`torch_gdn tune` rather than `torch_gdn.tools.tune`, in messages, help and documentation."""
    root = DOCS.parent
    folders = ("torch_gdn", "engines", "check", "docs", ".github")
    files = [file for folder in folders for file in (root / folder).rglob("*.*")]
    texts = {file: file.read_text() for file in [root / "README.md", *files] if file.suffix in (".py", ".md", ".yml")}
    names = "|".join(COMMANDS)
    module = re.compile(rf"-m torch_gdn\.(?:{names})\b(?!\.\w)|[\"`\u0020]torch_gdn\.(?:{names})[`:]|vllm\.serve:")
    result = {str(file.relative_to(root)): module.findall(text) for file, text in texts.items()}
    assert {name: words for name, words in result.items() if words} == {}


def test_a_reader_that_ends_first_is_no_error() -> None:
    """`python -m torch_gdn info | head` closes the pipe while the command prints."""
    command = [sys.executable, "-m", "torch_gdn", "info"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=DOCS.parent)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.readline()
    running.stdout.close()
    assert running.stderr.read() == ""
    assert running.wait() in (0, 1)


def test_arguments_go_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(serve, "main", given.append)
    command.main(["serve", "model", "--help", "--version"])
    assert given == [["model", "--help", "--version"]] and set(serve.ENGINES) == set(ENGINES)


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--port", "1"], ["--attn-implementation", "sdpa", "--port", "1"]),
        (["--attn-implementation", "eager"], ["--attn-implementation", "eager"]),
    ],
)
def test_transformers_serves(given: list[str], passed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(draining.Drain, "install", lambda drain: None)
    monkeypatch.setattr(transformers_serve, "main", lambda drafts: None)
    command.main(["serve", "--engine", "transformers", "model", *given])
    assert sys.argv == ["transformers", "serve", "model", "--continuous-batching", *passed]


@pytest.mark.parametrize(("given", "passed"), [("auto", "auto"), ("4", 4)])
def test_transformers_serves_with_drafts(given: str, passed: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching has no drafts."""
    asked: list[int | str] = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(draining.Drain, "install", lambda drain: None)
    monkeypatch.setattr(transformers_serve, "main", asked.append)
    command.main(["serve", "--engine", "transformers", "--drafts", given, "model"])
    assert asked == [passed]
    assert sys.argv == ["transformers", "serve", "model", "--attn-implementation", "sdpa"]


@pytest.mark.parametrize(
    ("engine", "drafts", "message"),
    [
        ("transformers", "17", "argument --drafts: expected auto or 1 to 16, got 17"),
        ("vllm", "2", "--drafts: expected --engine transformers, got vllm"),
    ],
)
def test_drafts_that_are_refused(engine: str, drafts: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["serve", "--engine", engine, "--drafts", drafts, "model"])
    assert message in f"{ended.value}{capsys.readouterr().err}"


def test_transformers_without_its_packages_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (extra,) = re.findall(r"(?s)\nserving = \[(.*?)\n\]", (DOCS.parent / "pyproject.toml").read_text())
    assert set(transformers_serve.SERVING) | {"torch_gdn[examples]"} == set(re.findall(r'"([\w\[\]]+)', extra))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(transformers_serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    monkeypatch.setattr(draining.Drain, "install", lambda drain: pytest.fail("it imports uvicorn"))
    with pytest.raises(SystemExit, match=r"^transformers serve: uvicorn: not installed.*pip install -e '.\[serving\]'"):
        command.main(["serve", "--engine", "transformers", "model"])


def test_sglang_serves_on_mps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("TORCH_GDN_SGLANG", "auto")
    monkeypatch.setattr(draining.Drain, "install", lambda drain: None)
    monkeypatch.setattr(serve, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(serve.runpy, "run_module", lambda *_, **__: started.append(sys.argv))
    monkeypatch.setattr(serve, "why_no_mps", lambda: "no device")
    with pytest.raises(SystemExit, match="python -m torch_gdn serve: no device"):
        command.main(["serve", "--engine", "sglang", "model"])
    monkeypatch.setattr(serve, "why_no_mps", lambda: "")
    command.main(["serve", "--engine", "sglang", "model", "--port", "1"])
    assert started == [["sglang", "--model-path", "model", "--device", "mps", "--port", "1"]]


def test_a_command_of_a_distribution_that_is_not_installed_names_what_installs_it() -> None:
    """-S leaves out the finders of editable installs."""
    environment = os.environ | {"PYTHONPATH": str(Path(torch.__file__).parents[1])}
    command = [sys.executable, "-S", "-m", "torch_gdn", "check", "--quick"]
    done = subprocess.run(command, cwd=DOCS.parent, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "python -m torch_gdn: expected the package torch_gdn_check, which is not installed here. In a checkout of "
        "torch_gdn: pip install -e '.[check]' --no-build-isolation"
    ]
