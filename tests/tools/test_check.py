"""python -m torch_gdn.check: on good kernels, on planted faults, on steps that crash or hang, and its parts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.devices import on_a_mac
from tests.helpers.files import replace_once
from torch_gdn import _C
from torch_gdn.check import __main__ as command
from torch_gdn.check import device as device_steps
from torch_gdn.check import golden, layer, plan, timing
from torch_gdn.check.report import Report, table
from torch_gdn.check.steps import FAIL, LEFT_OUT, PASS, LeftOut, Outcome, Result, Step, execute, judged
from torch_gdn.check.worker import Setup, Worker
from torch_gdn.testing.bounds import Part

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
pytestmark = pytest.mark.xdist_group("check")  # one process: the runs are shared
WANTED = (
    r"compile (solve_tril|chunk_local_cumsum) 64$",
    r"compile (chunk_fwd_h|fused_recurrent_gated_delta_rule) bfloat\w*_128_(128_64_4|true_false_false)_float$",
    r"recorded \S+ base_k128",
    "timing decode",
    "inductor",
)


def name_of(row: dict[str, Any]) -> str:
    return f"{row['section']} {row['group']} {row['case']}".strip()


@dataclass
class Run:
    process: subprocess.CompletedProcess[str]
    report: dict[str, Any]

    def status(self, name: str) -> str:
        (row,) = self.rows(name)
        return str(row["status"])

    def rows(self, name: str) -> list[dict[str, Any]]:
        found = [row for row in self.report["results"] if name_of(row) == name]
        assert found, f"no row {name}"
        return found


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    module = ["-m", "torch_gdn.check"] if on_a_mac() else ["-m", "mps_simulator", "-m", "torch_gdn.check"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a second process tests beside this one
    return subprocess.run(
        [sys.executable, *module, *arguments], cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )


def check(folder: Path, *arguments: str) -> Run:
    report = folder / "report.json"
    only = [argument for pattern in WANTED for argument in ("--only", pattern)]
    process = start("--json", str(report), *only, *arguments)
    assert report.is_file(), process.stdout + process.stderr
    return Run(process, json.loads(report.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the JSON")))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return check(tmp_path_factory.mktemp("good"))


DECAY = """\
      if (decay[token].weak) {
        UNROLL for (int m = 0; m < kParts; ++m) {
          UNROLL for (int r = 0; r < 2; ++r) state[2 * m + r] += factor * state[2 * m + r];
        }
      } else {
        UNROLL for (int m = 0; m < kParts; ++m) { UNROLL for (int r = 0; r < 2; ++r) state[2 * m + r] *= factor; }
      }
"""
READ = """\
      UNROLL for (int m = 0; m < kParts; ++m) {
        const float4 keys = *(threadgroup const float4*)(key + first_element<K>(m, at.place));
        UNROLL for (int r = 0; r < 2; ++r) part[r] += state[2 * m + r] * keys;
      }
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """solve_tril does not compile; the recurrent kernel decays the state after it has read it."""
    folder = tmp_path_factory.mktemp("planted")
    shaders = folder / "shaders"
    shutil.copytree(ROOT / "shaders", shaders)
    with (shaders / "gdn/solve_tril.metal").open("a") as file:
        file.write("constant int forgotten_semicolon = 1\n")
    replace_once(shaders / "gdn/fused_recurrent_gated_delta_rule.metal", DECAY + READ, READ + DECAY)
    return check(folder, "--shaders", str(shaders))


class TestOnGoodKernels:
    def test_everything_passes(self, good: Run) -> None:
        assert good.process.returncode == 0, good.process.stdout
        assert good.report["status"] == PASS
        assert not [row for row in good.report["results"] if row["status"] == FAIL]
        assert good.process.stdout.splitlines()[-2].startswith("pass: ")

    def test_the_machine_is_described(self, good: Run) -> None:
        (facts,) = good.rows("facts this machine")
        assert facts["figures"]["versions"]["torch"] == torch.__version__
        assert facts["figures"]["system"]["chip"] and facts["figures"]["mps"]["name"]
        assert facts["figures"]["mps"]["shaders"] == _C.shader_directory()
        assert (facts["figures"]["simulated"] is None) == on_a_mac()

    def test_a_compiled_kernel_has_figures(self, good: Run) -> None:
        (row,) = good.rows("compile solve_tril 64")
        figures = row["figures"]
        assert figures["compile_seconds"] > 0 and figures["max_total_threads_per_threadgroup"] >= 128
        assert figures["warnings"] == ""
        assert ("static_threadgroup_memory_length" in figures) == on_a_mac()

    def test_error_stands_beside_bound(self, good: Run) -> None:
        algorithms = [f"chunk_gated_delta_rule:{algorithm}" for algorithm in _C.prefill_algorithms()]
        for op in ("recompute_w_u", *algorithms, "fused_recurrent_gated_delta_rule"):
            (row,) = good.rows(f"recorded {op} base_k128")
            assert len(row["figures"]["tensors"]) == 2
            for figures in row["figures"]["tensors"].values():
                assert 0 < figures["error"] <= figures["bound"] < 4e-3

    def test_each_stage_and_both_end_to_end_ops_are_held_against_fla(self, good: Run) -> None:
        ops = {row["group"] for row in good.report["results"] if row["section"] == "recorded"}
        groups = {plan.group_of(op, algorithm) for op in golden.PREFIXES for algorithm in plan.algorithms_of(op)}
        assert ops == {*plan.stages.OUTPUTS, *groups} and len(groups) == 4

    @pytest.mark.skipif(on_a_mac(), reason="a Mac has times")
    def test_times_of_the_simulated_device_are_left_out(self, good: Run) -> None:
        rows = [row for row in good.report["results"] if row["section"] in ("timing", "inductor")]
        assert rows and {row["status"] for row in rows} == {LEFT_OUT}
        assert "the times of the simulated device say nothing of a Mac" in good.process.stdout

    def test_a_progress_bar_counts_the_steps(self, good: Run) -> None:
        steps = len(good.report["results"])
        assert f"{steps}/{steps}" in good.process.stderr

    def test_the_table_has_a_line_for_each_kernel_and_op(self, good: Run) -> None:
        lines = good.process.stdout.splitlines()
        (line,) = [line for line in lines if line.startswith("recorded  solve_tril ")]
        assert line.split()[2:4] == ["1", "pass"] and "error " in line and "bound 5.00e-06" in line


class TestOnPlantedFaults:
    def test_the_run_fails_but_ends(self, planted: Run) -> None:
        assert planted.process.returncode == 1
        assert planted.report["status"] == FAIL
        assert planted.process.stdout.splitlines()[-2].startswith("FAIL: ")

    def test_a_shader_that_does_not_compile_is_named_with_the_compilers_words(self, planted: Run) -> None:
        (row,) = planted.rows("compile solve_tril 64")
        assert row["status"] == FAIL
        for words in ("could not compile solve_tril_64", "gdn/solve_tril.metal:", "error: expected ';'"):
            assert words in row["message"] and words in planted.process.stdout

    def test_a_wrong_kernel_is_named_with_error_and_bound(self, planted: Run) -> None:
        name = "recorded fused_recurrent_gated_delta_rule base_k128"
        (row,) = planted.rows(name)
        assert row["status"] == FAIL
        figures = row["figures"]["tensors"]["recurrent_o"]
        assert figures["error"] > 10 * figures["bound"]
        assert f"failed: {name}" in planted.process.stdout and "allowed" in row["message"]
        assert planted.status("compile fused_recurrent_gated_delta_rule bfloat_128_true_false_false_float") == PASS

    def test_nothing_else_fails(self, planted: Run) -> None:
        failed = {(row["section"], row["group"]) for row in planted.report["results"] if row["status"] == FAIL}
        assert failed == {
            ("compile", "solve_tril"),
            ("recorded", "solve_tril"),
            ("recorded", "chunk_gated_delta_rule:recurrent"),
            ("recorded", "fused_recurrent_gated_delta_rule"),
        }


def crash(device: torch.device) -> Outcome:
    print("what Metal says before it aborts", flush=True)
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError("not reached")


def hang(device: torch.device) -> Outcome:
    time.sleep(600)
    raise AssertionError("not reached")


def refuse(device: torch.device) -> Outcome:
    raise ValueError("expected something else")


def leave_out(device: torch.device) -> Outcome:
    raise LeftOut("not here")


def passing(device: torch.device) -> Outcome:
    return Outcome({"device": str(device)})


def step(run: Any, section: str = "compile") -> Step:
    return Step(section, "kernel", "", run)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    # The hanging step is the only one that takes this long; the start of a process has its own time.
    worker = Worker(Setup(_C.shader_directory(), simulated=None, device="cpu"), step_seconds=5)
    yield worker
    worker.close()


class TestTheProcessOfItsOwn:
    def test_a_crash_is_a_failure_with_what_was_printed_and_the_next_step_runs(self, worker: Worker) -> None:
        result = worker.run(step(crash))
        assert result.status == FAIL
        assert "signal SIGABRT" in result.message and "what Metal says before it aborts" in result.message
        assert worker.run(step(passing)).status == PASS

    def test_a_hang_is_a_failure(self, worker: Worker) -> None:
        result = worker.run(step(hang))
        assert result.status == FAIL and "no answer within 5 s" in result.message

    def test_an_exception_is_a_failure_with_its_traceback(self) -> None:
        result = execute(step(refuse), CPU)
        assert (result.status, result.message) == (FAIL, "ValueError: expected something else")
        assert "in refuse" in result.traceback

    def test_it_is_given_up_when_every_process_dies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch_gdn.check.worker.MOST_LOSSES", 1)
        worker = Worker(Setup("", simulated={"no such setting": 1}))
        assert "the process died: exit status 1" in worker.run(step(passing)).message
        assert "not tried" in worker.run(step(passing)).message
        worker.close()


class TestWithoutADevice:
    def run(self, *steps: Step) -> list[Result]:
        class Here:
            def run(self, step: Step) -> Result:
                return execute(step, CPU)

        results: list[Result] = []
        command.run(steps, Here(), results)  # type: ignore[arg-type]
        return results

    def test_nothing_is_tried(self) -> None:
        results = self.run(step(refuse, "facts"), step(passing), step(passing, "recorded"))
        assert [result.status for result in results] == [FAIL, LEFT_OUT, LEFT_OUT]
        assert "expected something else" in results[1].message

    def test_a_device_that_pytorch_cannot_use_can_still_compile(self) -> None:
        facts, use = step(passing, "facts"), step(leave_out, "use")
        results = self.run(facts, use, step(passing), step(passing, "recorded"))
        assert [result.status for result in results] == [PASS, LEFT_OUT, PASS, LEFT_OUT]

    def test_a_virtual_machines_gpu_is_no_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def out_of_memory(device: torch.device) -> torch.Tensor:
            raise RuntimeError("MPS backend out of memory")

        monkeypatch.setattr(device_steps, "round_trip", out_of_memory)
        for name, status in (("Apple Paravirtual device", LEFT_OUT), ("Apple M4", FAIL)):
            monkeypatch.setattr(_C, "device_facts", lambda name=name: {"name": name})
            result = execute(step(device_steps.check_use), CPU)
            assert result.status == status and "MPS backend out of memory" in result.message

    @pytest.mark.skipif(on_a_mac(), reason="a Mac has a device")
    def test_the_report_says_so(self, tmp_path: Path) -> None:
        arguments = [sys.executable, "-m", "torch_gdn.check", "--quick", "--json", str(tmp_path / "report.json")]
        process = subprocess.run(arguments, cwd=ROOT, text=True, capture_output=True, check=False)
        assert process.returncode == 1
        simulated = "this checkout has a simulated one: python -m mps_simulator -m torch_gdn.check"
        reason = f"this PyTorch has no mps device; {simulated}"
        assert process.stdout == f"FAIL: {reason}\nreport: {tmp_path / 'report.json'}\n"
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["status"] == FAIL
        assert [(name_of(row), row["message"]) for row in report["results"]] == [("facts this machine", reason)]


class TestWithoutRecordedOutputs:
    def test_it_is_said_and_the_stages_are_held_against_float64(self, tmp_path: Path) -> None:
        steps = plan.steps(tmp_path, quick=True)
        (recorded,) = [step for step in steps if step.section == "recorded"]
        result = execute(recorded, CPU)
        assert result.status == LEFT_OUT and f"no FLA outputs in {tmp_path}" in result.message
        (seeded,) = [step for step in steps if step.name == "seeded chunk_fwd_h bfloat"]
        assert execute(seeded, CPU).status == PASS


def test_every_seeded_step_passes_on_the_cpu() -> None:
    """The steps themselves are right: no kernel of Metal's takes part."""
    steps = [each for each in plan.steps(golden.FOLDER, quick=True) if each.section == "seeded"]
    assert len(steps) > 10
    for each in steps:
        result = execute(each, CPU)
        assert result.status == PASS, (each.name, result.message)


def test_a_timing_has_both_medians_and_their_ratio() -> None:
    for tokens in (1, 70):
        run = partial(timing.check_timing, shape=(1, 2, 64, 64), tokens=tokens, repeats=3, calls=2)
        result = execute(Step("timing", "decode", "model", run), CPU)
        assert result.status == PASS, result.message
        figures = result.figures
        assert figures["seconds"] > 0
        assert figures["ratio"] == pytest.approx(figures["fallback_seconds"] / figures["seconds"])
        assert f"T {tokens}: " in table([result])[1] and "ratio" in table([result])[1]


def test_a_timing_of_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = timing.torch_gdn.fused_recurrent_gated_delta_rule

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return right(q, k, 1.1 * v, **options)

    monkeypatch.setattr(timing.torch_gdn, "fused_recurrent_gated_delta_rule", wrong)
    outcome = timing.check_timing(CPU, (1, 2, 64, 64), tokens=1, repeats=1, calls=1)
    assert "the outputs are" in outcome.problem


def test_the_layer_compiles_without_a_graph_break() -> None:
    assert not layer.check_layer(CPU, backend="aot_eager").problem


def test_the_layer_fails_when_the_compiled_one_differs() -> None:
    def off_by_one(graph: Any, inputs: Any) -> Any:
        return lambda *tensors: [x + 1 for x in graph(*tensors)]

    assert "output: error" in layer.check_layer(CPU, backend=off_by_one).problem  # type: ignore[arg-type]


class TestTheReport:
    def report(self, *results: Result) -> Report:
        return Report("2026-01-01T00:00:00+00:00", 1.0, {}, list(results))

    def test_nan_is_too_much_and_is_valid_json(self) -> None:
        outcome = judged([Part("o", "the whole", 1e-9, 1e-6), Part("o", "head 0", float("nan"), 1e-6)])
        assert "head 0" in outcome.problem
        text = self.report(Result("recorded", "op", "case", FAIL, figures=outcome.figures)).json()
        assert "NaN" not in text
        assert json.loads(text)["results"][0]["figures"]["tensors"]["o"]["error"] == "nan"

    def test_a_message_of_many_cases_is_printed_once(self) -> None:
        cases = ("bfloat_64", "half_64", "float_64")
        rows = [Result("compile", "l2norm", case, FAIL, message=f"l2norm_{case}: error: no") for case in cases]
        text = self.report(*rows).text()
        assert text.count("error: no") == 1
        assert "failed: compile l2norm bfloat_64 and 2 more" in text

    def test_an_interrupted_run_has_not_passed(self) -> None:
        report = self.report(Result("compile", "l2norm", "", PASS))
        assert report.passed
        report.interrupted = True
        assert not report.passed and "interrupted" in report.text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "no such step"], "--only: no step has such a name"),
        (["--only", "("], "--only: expected a regular expression"),
        (["--golden", "no such folder"], "--golden: expected a folder"),
        (["--shaders", "no such folder"], "--shaders: expected a folder"),
        (["--json", "no such folder/report.json"], "--json: expected a file in a folder that exists"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        command.main(arguments)
    assert exit_status.value.code == 2
    assert f"argument {words}" in capsys.readouterr().err or words.startswith("--only: no step")


def test_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        command.main(["--help"])
    assert exit_status.value.code == 0
    for option in ("--json", "--quick", "--only", "--golden", "--shaders"):
        assert option in capsys.readouterr().out or option != "--json"
