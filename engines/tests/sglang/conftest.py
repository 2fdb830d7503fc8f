from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import sweeps
from tests.helpers.packed_models import Format, packed_model
from tests.helpers.small_models import generated, model_of, prompts, tokenizer_into
from torch_gdn_engines import torchvision_operators

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GREEDY_TOKENS = 12

torchvision_operators.declare()  # transformers needs them here


def pytest_report_header() -> str:
    return sweeps.header()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Engines take minutes: a run starts one in six, and `make proof` all. Files that start none, or one, run whole."""
    if item.path.name not in ("test_hooks.py",):
        item.add_marker(pytest.mark.sweep(6, among="engine"))


@pytest.hookimpl(trylast=True)  # so that it samples what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sweeps.deselect(config, items)


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process that runs the engine on mps, simulated if the machine has none."""
    return {
        **os.environ,
        "SGLANG_ENGINE_TESTS": "1",
        "TORCH_GDN_SGLANG": "mps",
        "TORCH_GDN_SELF_TEST": "off",
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "site", ROOT, ROOT / "engines"])),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_engine(scenario: dict[str, Any], **variables: str) -> dict[str, Any]:
    """Runs the engine in a separate process, because SGLang kills the process that made a failing engine."""
    engine = subprocess.Popen(
        [sys.executable, str(HERE / "scenario.py")],
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    output, log = engine.communicate(json.dumps(scenario), timeout=900)
    lines = [line for line in output.splitlines() if line.startswith('{"rounds"')]  # the other lines are logs
    if engine.returncode or not lines:
        raise EngineFailed(f"exit status {engine.returncode}\n{output[-3000:]}\n{log[-6000:]}")
    result: dict[str, Any] = json.loads(lines[0])
    return {**result, "processes": processes_of(engine.pid)}


def processes_of(session: int) -> list[str]:
    """Returns the processes of a session that still run ten seconds after its first one ended, and kills them."""
    members = [each for each in psutil.process_iter() if os.getsid(each.pid) == session]
    _, left = psutil.wait_procs(members, timeout=10)
    for process in left:
        process.kill()
    return [process.name() for process in left]


class EngineFailed(Exception):
    pass


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model(folder: Path) -> Callable[[str], Path]:
    """Returns the folder of a family's model with a tokenizer and the key of released files that transformers omits."""

    @cache
    def of(family: str) -> Path:
        path = model_of(family, folder)
        tokenizer_into(path)
        config = path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "full_attention_interval": 2}))
        return path

    return of


def as_released(path: Path, folder: Path) -> Path:
    """Writes a text model in the form of Qwen3.5's released files, which also have a vision tower."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    target = folder / "as_released"
    shutil.copytree(path, target)
    weights = load_file(path / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    whole, name = (Qwen3_5MoeConfig, "Qwen3_5Moe") if "num_experts" in text else (Qwen3_5Config, "Qwen3_5")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = whole(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]).to_dict()
    more = {"text_config": text, "architectures": [f"{name}ForConditionalGeneration"]}
    (target / "config.json").write_text(json.dumps({**config, **more}))
    return target


@pytest.fixture(scope="session")
def reference(model: Callable[[str], Path]) -> Callable[[str], tuple[Path, list[Any], list[Any]]]:
    """Returns a family's model folder, the prompts, and transformers' tokens in float32."""

    @cache
    def of(family: str) -> Any:
        texts = prompts(12, 130)
        return model(family), texts, generated(model(family), texts, GREEDY_TOKENS)[0]

    return of


@pytest.fixture(scope="session")
def packed(model: Callable[[str], Path], folder: Path) -> Callable[[str, Format], tuple[Path, Path]]:
    """Returns the folder of a family's model with packed weights, and of one with the same weights as numbers."""

    @cache
    def of(family: str, how: Format) -> tuple[Path, Path]:
        return packed_model(model(family), how, folder / f"{family} {how.layout}")

    return of
