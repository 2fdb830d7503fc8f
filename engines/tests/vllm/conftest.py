from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import sweeps
from tests.helpers.small_models import generated, model_of, prompts
from torch_gdn_engines import torchvision_operators

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GREEDY_TOKENS = 12
CHUNKS = {"max_num_batched_tokens": 64}  # prompts come in parts, while others decode

torchvision_operators.declare()  # here for transformers; in an engine, the plugin does it


def pytest_report_header() -> str:
    return sweeps.header()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Engines take minutes: a run starts one in six, and `make proof` all. Files that start none, or one, run whole."""
    if item.path.name not in ("test_borders.py", "test_plugin.py", "test_stored_layers.py"):
        item.add_marker(pytest.mark.sweep(6, among="engine"))


@pytest.hookimpl(trylast=True)  # so that it samples what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sweeps.deselect(config, items)


def environment(device: str, first: Sequence[Path] = ()) -> dict[str, str]:
    """Returns the environment of a process that runs the engine: cpu, mps (simulated if there is none), or off.

    first: folders that modules come from before any other.
    """
    import torch

    is_simulated = device == "mps" and not torch.backends.mps.is_available()
    folders = [*first, HERE / "site", ROOT, ROOT / "engines"] if is_simulated else [*first, ROOT, ROOT / "engines"]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **os.environ,
        "TORCH_GDN_VLLM": device,
        "TORCH_GDN_SELF_TEST": "off",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1" if "PYTEST_XDIST_WORKER" in os.environ else str(os.cpu_count()),
    }


def run_at_start(code: str, folder: Path) -> None:
    """Writes a module into the folder, for `environment`: Python runs the code as it starts."""
    import torch

    own = "" if torch.backends.mps.is_available() else (HERE / "site" / "sitecustomize.py").read_text()
    (folder / "sitecustomize.py").write_text(own + code)


def scenario(model: Path, texts: list[Any], *rounds: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns what scenario.py runs: greedy tokens of the texts in one round, or in each round with what it changes."""
    plain = {"prompts": texts, "tokens": GREEDY_TOKENS}
    options = {"dtype": "float32", **options}
    return {"model": str(model), "options": options, "rounds": [plain | each for each in rounds or ({},)]}


def run_engine(
    device: str, scenario: dict[str, Any], first: Sequence[Path] = (), variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    (result,) = run_engines(device, [scenario], first, variables)
    return result


def run_engines(
    device: str,
    scenarios: list[dict[str, Any]],
    first: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One engine after the other, in one process. `variables` change its environment."""
    done = subprocess.run(
        [sys.executable, str(HERE / "scenario.py")],
        input=json.dumps(scenarios),
        env=environment(device, first) | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    if done.returncode:
        raise EngineFailed(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('[{"rounds"')]  # others log here too
    results: list[dict[str, Any]] = json.loads(line)
    return results


class EngineFailed(Exception):
    pass


def assert_tokens_agree(
    generated: list[list[int]], tokens: list[list[int]], margins: list[list[float]], most: float
) -> None:
    """Each sequence is the reference's, up to a place where the reference's two best tokens are closer than `most`."""
    for got, want, margin in zip(generated, tokens, margins, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(got, want, strict=True)) if x != y), None)
        assert first is None or margin[first] < most, (first, margin)


@pytest.fixture(params=["cpu", "mps"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Any:
    import torch
    import vllm.platforms

    from torch_gdn_engines.vllm.mps_platform import MpsPlatform

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    platform = MpsPlatform()
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    return platform


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def reference(folder: Path) -> Callable[..., tuple[Path, list[Any], list[Any], list[Any]]]:
    """(model's folder, prompts, transformers' tokens, their margins) of a family."""

    @cache
    def of(family: str, count: int = 12, longest: int = 130, dtype: str = "float32") -> Any:
        path = model_of(family, folder)
        texts = prompts(count, longest)
        return (path, texts, *generated(path, texts, GREEDY_TOKENS, dtype))

    return of
