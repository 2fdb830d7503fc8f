"""Runs the examples and the report as a user would, in separate processes unless they end at once."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ON_MAC = sys.platform == "darwin"
METAL_DEVICE = "mps" if ON_MAC else "simulated-mps"
SHORT = ("--prompt-file", "LICENSE", "--prompt-tokens", "70", "--new-tokens", "3", "--modules", "1")
pytestmark = [
    pytest.mark.xdist_group("examples"),  # one process, because tests share the outputs
    pytest.mark.sweep(1, seeds=4),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a second process tests at the same time
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )


def generate(device: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("examples/generate.py", "--device", device, *SHORT, *arguments)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a program in this process, which already has transformers. Returns its exit status and its output."""

    def call(program: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples" / program), run_name="__main__")
        printed, errors = capsys.readouterr()
        if isinstance(ended.value.code, str):  # Python prints it and exits with 1
            return 1, printed, errors + ended.value.code
        return ended.value.code or 0, printed, errors

    return call


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    finished = {device: generate(device) for device in ("cpu", METAL_DEVICE)}
    for process in finished.values():
        assert process.returncode == 0, process.stdout + process.stderr
    return {device: process.stdout for device, process in finished.items()}


@pytest.fixture(params=["cpu", METAL_DEVICE])
def generated(request: pytest.FixtureRequest, outputs: dict[str, str]) -> tuple[str, str]:
    return request.param, outputs[request.param]


def test_generate_agrees_with_transformers(generated: tuple[str, str]) -> None:
    _, output = generated
    assert "below 1e-04 wanted: pass" in output


def test_generate_predicts_held_back_modules_as_transformers_does(generated: tuple[str, str]) -> None:
    _, output = generated
    line = next(line for line in output.split("\n") if line.startswith("bits"))
    assert line.endswith(": pass")
    assert 0.5 < float(line.partition("torch_gdn ")[2].partition(",")[0]) < 2  # 8 before training


def test_generate_runs_prefill_and_decode_through_the_ops(generated: tuple[str, str]) -> None:
    device, output = generated
    assert "3 x gdn.chunk_gated_delta_rule" in output  # three Gated DeltaNet layers, once for the prompt
    decode = "fused_recurrent_gated_delta_rule" if device == "cpu" else "gdn_decode_"
    assert f"9 x gdn.{decode}" in output  # three tokens more


def test_generate_names_the_metal_kernels_that_ran(generated: tuple[str, str]) -> None:
    device, output = generated
    kernels = output.partition("\nkernels")[2].partition("\nprefill")[0]
    for kernel in ("causal_conv1d_", "chunk_gated_delta_rule_", "gdn_decode_", "rms_norm_gated_"):
        assert (kernel in kernels) == (device != "cpu"), kernel


def test_generate_begins_with_the_same_text_on_every_device(outputs: dict[str, str]) -> None:
    texts = [output.partition("\ndevice ") for output in outputs.values()]
    assert all(text.startswith("text ") and "|" in text and rest for text, _, rest in texts)
    assert len({text for text, _, _ in texts}) == 1


WITH_A_FAULT = """
import runpy, sys, torch_gdn
def with_another_decay(rule):
    return lambda q, k, v, g, *others, **options: rule(q, k, v, g * 1.01, *others, **options)
for name in ("{function}", "{function}_"):  # a cache's state may be updated in place
    setattr(torch_gdn, name, with_another_decay(getattr(torch_gdn, name)))
sys.argv = ["generate.py", "--device", "cpu", *{short!r}]
runpy.run_path("examples/generate.py", run_name="__main__")
"""


@pytest.mark.sweep(2, seeds=4)
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_generate_fails_on_a_decay_one_percent_off(function: str) -> None:
    finished = run("-c", WITH_A_FAULT.format(function=function, short=SHORT))
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "wanted: FAIL" in finished.stdout


@pytest.mark.skipif(ON_MAC, reason="a Mac has an mps device")
@pytest.mark.parametrize(
    ("program", "words"),
    [("generate", "there is no mps device here"), ("chat", "--device mps: this PyTorch has no mps device")],
)
def test_an_absent_device_is_refused(
    program: str, words: str, refused: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    status, _, errors = refused(f"{program}.py", "--device", "mps")
    assert status == 1 and words in errors


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_generate_refuses_a_prompt_without_text(
    name: str, tmp_path: Path, refused: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "empty").touch()
    status, _, errors = refused("generate.py", "--prompt-file", str(tmp_path / name))
    assert status == 2 and "--prompt-file: expected a file with text in it" in errors


def test_generate_helps(refused: Callable[..., tuple[int, str, str]]) -> None:
    status, printed, _ = refused("generate.py", "--help")
    assert status == 0 and "--device" in printed


def test_info_reports_versions_ops_and_agreement() -> None:
    finished = run("-m", "torch_gdn", "info")
    assert finished.returncode == 0, finished.stderr
    assert "torch: 2." in finished.stdout
    assert "gdn::solve_tril: CPU" in finished.stdout
    assert "cpu: relative distance" in finished.stdout
    assert "self-test of kernels\n" in finished.stdout
    assert "WRONG" not in finished.stdout


@pytest.mark.skipif(ON_MAC, reason="the simulated device is for machines without a Mac's GPU")
def test_info_reports_the_simulated_device() -> None:
    finished = run("-m", "mps_simulator", "-m", "torch_gdn", "info")
    assert finished.returncode == 0, finished.stderr
    assert "mps: relative distance" in finished.stdout
    assert "fused_chunk_gated_delta_rule_float_64_16_4_float: compiled in" in finished.stdout


def test_chat_reuses_the_conversation(tmp_path: Path) -> None:
    def chat(typed: str) -> list[str]:
        command = [sys.executable, "examples/chat.py", "--device", "cpu", "--new-tokens", "8"]
        process = subprocess.run(
            [*command, "--file", str(tmp_path / "conversations.safetensors")],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            input=typed,
            text=True,
            capture_output=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return [line.partition(" prefilled")[0] for line in process.stdout.split("\n") if line.startswith("[")]

    told = ["[0 of 9 tokens reused, 9", "[16 of 21 tokens reused, 5"]
    assert chat("def f():\nabc\n") == told
    assert chat("def f():\n") == ["[8 of 9 tokens reused, 1"]  # from the file


def test_finetune_learns(tmp_path: Path) -> None:
    plot = tmp_path / "loss.svg"
    finished = run("examples/finetune.py", "--steps=6", "--batch=2", "--pieces=4", f"--plot={plot}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "bits      per byte of 4 pieces" in finished.stdout and "rms_norm_gated" not in finished.stdout
    assert len(ElementTree.parse(plot).findall(".//{*}polyline")) == 1
