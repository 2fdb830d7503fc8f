"""vLLM 0.33, of which there is no CPU wheel: the CUDA wheel's Python files, without compiled kernels, as on a Mac."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engines.tests.vllm.conftest import CHUNKS, ROOT, assert_tokens_agree, run_engine, scenario
from engines.tests.vllm.test_engine import NGRAM
from engines.tests.vllm.test_parallel import assert_two_are_one

VERSION = "0.33.0"


def python_files_of(version: str) -> Path:
    """Downloaded once, 336 MB, into build/."""
    folder = ROOT / "build" / f"vllm-{version}"
    if (folder / "vllm").is_dir():
        return folder
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*download, "--dest", str(folder), f"vllm=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = (name for name in archive.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name)
        archive.extractall(folder, wanted)
    wheel.unlink()
    return folder


@pytest.mark.versions
def test_drafts_on_mps(reference: Any) -> None:
    path, texts, tokens, _ = reference("qwen3_next")
    drafted = {"accept": [0, 3, 1, 2], "continuations": tokens}
    given = scenario(path, texts, {}, drafted, **CHUNKS, speculative_config=NGRAM)
    result = run_engine("mps", given, [python_files_of(VERSION)])
    assert result["version"] == VERSION
    assert [each["tokens"] for each in result["rounds"]] == [tokens, tokens]
    assert result["compiled late"] == []


@pytest.mark.versions
def test_codes_by_the_name_of_a_dtype(reference: Any) -> None:
    path, texts, tokens, margins = reference("qwen3")
    given = scenario(path, texts, **CHUNKS, kv_cache_dtype="aura_8v8")
    result = run_engine("mps", given, [python_files_of(VERSION)])
    assert any(name.startswith("aura_paged_attention") for name in result["kernels"])
    assert_tokens_agree(result["rounds"][0]["tokens"], tokens, margins, 0.05)


@pytest.mark.versions
@pytest.mark.parametrize(
    "kind, family, features",
    [
        ("pipeline_parallel_size", "qwen3_5", "packed, aura"),
        ("pipeline_parallel_size", "qwen3_next_moe", ""),
        ("tensor_parallel_size", "qwen3_next_mtp", "drafts"),
    ],
)
def test_two_processes(kind: str, family: str, features: str, reference: Any, tmp_path: Path) -> None:
    assert assert_two_are_one(kind, family, features, reference, tmp_path, [python_files_of(VERSION)]) == VERSION
