"""Tests the plugin's errors when it cannot work. SGLang would log them and continue."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.tests.sglang.conftest import ROOT, environment
from torch_gdn.quantized.formats import SUPPORTED

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); print('loaded')"
RENAMED = "import sglang.kernels.ops.attention.linear.fused_gdn_gating as m; del m.fused_gdn_gating; "
UNAPPLIED = (
    "from sglang.srt.plugins.hook_registry import HookRegistry; "
    "HookRegistry._apply_target = classmethod(lambda cls, target, hooks: None); "
)
REFUSED = """
from sglang.srt.server_args import ServerArgs
from torch_gdn_engines.sglang.quantized import LinearBase, PackedConfig
from torch_gdn.quantized import configuration

def refused(call):
    try:
        call()
    except ValueError as error:
        print("ValueError", error)

for each in {arguments}:
    refused(lambda: ServerArgs(**{{"model_path": {path!r}, "device": "mps", **each}}).resolve_once())
config = PackedConfig(configuration.read({{"quant_method": "gptq", "bits": 4}}))
config.shapes = {{"lm_head.qweight": (8, 64), "lm_head.scales": (1, 64)}}
refused(config.check_that_all_is_loaded)
refused(lambda: config.get_quant_method(object.__new__(LinearBase), "a.b"))
"""
REFUSED_FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic"},
    "bitsandbytes": {"load_in_4bit": True},
}
VERSION = "import importlib.metadata; importlib.metadata.version = lambda name: '0.5.24'; "


def load(before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + LOAD + after]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "before, said",
    [
        (RENAMED, "fused_gdn_gating.fused_gdn_gating does not exist"),
        (UNAPPLIED, "elementwise.fused_sigmoid_mul is still SGLang's"),
        (VERSION, "checked with SGLang 0.5.23, not with 0.5.24: install that version, or set TORCH_GDN_SGLANG=off"),
    ],
    ids=["renamed", "unapplied", "version"],
)
def test_a_process_ends_with_one_sentence(before: str, said: str) -> None:
    done = load(before)
    assert done.returncode == 1 and "loaded" not in done.stdout
    assert said in done.stderr.splitlines()[-1]


def test_what_is_not_supported_is_refused_before_a_model_is_loaded(model: Any, tmp_path: Path) -> None:
    arguments = [
        {"speculative_algorithm": "NEXTN", "disable_radix_cache": True},
        {"enable_deterministic_inference": True},
        {"enable_linear_replayssm": True},
        {"speculative_algorithm": "NGRAM"},
        {"enable_page_major_kv_layout": True},
        {"enable_unified_memory": True},
        {"device": "cpu"},
    ]
    wanted = [f"{name}: torch_gdn's SGLang plugin " for name in (next(iter(given)) for given in arguments)]
    arguments.append({"quantization": "awq"})
    wanted.append(f"quantization: expected {SUPPORTED}, on mps, got --quantization awq of an unquantised")
    for method, settings in REFUSED_FORMATS.items():
        folder = shutil.copytree(model("qwen3_5"), tmp_path / method)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, **settings}
        (folder / "config.json").write_text(json.dumps(config))
        arguments.append({"model_path": str(folder)})
        wanted.append(f"quantization: expected {SUPPORTED}, on mps, got {method}")
    wanted.append("lm_head: SGLang needs this weight unquantised; the checkpoint has it packed")
    wanted.append("a.b: expected a weight of a.b in the files, got none")
    done = load(after=REFUSED.format(path=str(model("qwen3_5")), arguments=arguments))
    said = [line for line in done.stdout.splitlines() if line.startswith("ValueError")]
    assert len(said) == len(wanted), done.stdout + done.stderr
    for line, sentence in zip(said, wanted, strict=True):
        assert line.startswith(f"ValueError {sentence}")


def test_sglang_has_the_options_that_its_page_names() -> None:
    named = set(re.findall(r"`--([a-z-]+)", (ROOT / "docs" / "sglang.md").read_text()))
    fields = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "arg_groups" / "field_order.py"
    known = set(re.findall(r'"(\w+)"', fields.read_text()))
    assert len(named) == 6 and {name.replace("-", "_") for name in named} - known == set()


STATES = (
    "; import torch, types; from sglang.srt.configs.mamba_utils import mamba2_state_dtype as dtypes; "
    "print(dtypes(types.SimpleNamespace(torch_gdn_dtype=torch.float16)))"
)


@pytest.mark.parametrize("variable, expected", [("", "conv=torch.float16"), ("float32", "conv=torch.float32")])
def test_the_states_of_convolutions_have_the_models_dtype_or_the_one_asked_for(variable: str, expected: str) -> None:
    asked = f"import os; os.environ['SGLANG_MAMBA_CONV_DTYPE'] = '{variable}'; " if variable else ""
    assert expected in load(asked, STATES).stdout
