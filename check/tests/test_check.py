"""Tests python -m torch_gdn check with good kernels, planted faults, steps that crash or hang, and its parts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.devices import on_a_mac, ready
from tests.helpers.files import replace_once
from torch_gdn import _C
from torch_gdn._recorder import KernelVariant, Launch
from torch_gdn_check import __main__ as command
from torch_gdn_check import comparisons, first_call, golden, layer, models, plan, timing
from torch_gdn_check import device as device_steps
from torch_gdn_check.fake_mps import fake_mps
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.cases import make_case
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.registry import launches_at
from torch_gdn_check.report import Report, table
from torch_gdn_check.steps import FAIL, PASS, SKIPPED, Outcome, Result, Skipped, Step, execute
from torch_gdn_check.worker import Setup, Worker, Workers

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.xdist_group("check"),  # one process, because tests share the runs
    pytest.mark.sweep(1, seeds=2),
]
WANTED = (r"probe (matrix|error)", r"recorded \S+ base_k128", "pipelines", "time l2norm", "timing decode", "model")


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
        result = [row for row in self.report["results"] if name_of(row) == name]
        assert result, f"no row {name}"
        return result


COMMAND = [sys.executable, *([] if on_a_mac() else ["-m", "mps_simulator"]), "-m", "torch_gdn", "check", "--quick"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # a second process tests at the same time


def check(folder: Path, *arguments: str) -> Run:
    report = folder / "report.json"
    only = [argument for pattern in WANTED for argument in ("--only", pattern)]
    process = subprocess.run(
        [*COMMAND, "--json", str(report), *only, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert report.is_file(), process.stdout + process.stderr
    return Run(process, json.loads(report.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the JSON")))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return check(tmp_path_factory.mktemp("good"))


DECAY = """\
      decay_state<K>(state, decay[token]);
"""
STEP = """\
      const float own_beta = beta_tile[Channels ? token * kStateColumns + at.own_row : token];
      const float own_value = v_tile[token * kStateColumns + at.own_row];
      const float output = parameters.scale * update_and_read<K>(state, key, query, own_beta, own_value, at);
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Plants faults: solve_tril does not compile, and the recurrent kernel decays the state after reading it."""
    folder = tmp_path_factory.mktemp("planted")
    shaders = folder / "shaders"
    shutil.copytree(ROOT / "shaders", shaders)
    with (shaders / "gdn/solve_tril.metal").open("a") as file:
        file.write("constant int forgotten_semicolon = 1\n")
    replace_once(shaders / "gdn/fused_recurrent_gated_delta_rule.metal", DECAY + STEP, STEP + DECAY)
    return check(folder, "--shaders", str(shaders))


class TestOnGoodKernels:
    def test_everything_passes(self, good: Run) -> None:
        assert good.process.returncode == 0, good.process.stdout
        assert good.report["status"] == PASS
        assert not [row for row in good.report["results"] if row["status"] == FAIL]
        assert good.process.stdout.splitlines()[-2].startswith("pass: ")

    def test_the_machine_is_described(self, good: Run) -> None:
        (facts,) = good.rows("facts this machine")
        assert facts["figures"]["versions"]["torch"] == importlib.metadata.version("torch")
        assert facts["figures"]["system"]["chip"] and facts["figures"]["mps"]["name"]
        assert facts["figures"]["mps"]["shaders"] == _C.shader_directory()
        assert (facts["figures"]["simulated"] is None) == on_a_mac()
        machine, absent = facts["figures"]["machine"], facts["figures"]["absent"]
        assert {name for name, fact in machine.items() if fact is None} == absent.keys()
        assert machine["GPU families"] and machine["maxBufferLength"] and machine["compiler at build"]
        assert on_a_mac() or absent["virtual machine"] == "this exists on macOS only"

    def test_a_probe_says_what_it_assumed_and_measured(self, good: Run) -> None:
        (row,) = good.rows("probe error log")
        assert row["status"] == PASS and row["figures"].keys() == {"assumption", "needed_for", "measured"}
        assert "expected nothing, got 42 at 7" in row["figures"]["measured"]["raised"]

    def test_a_kernel_that_was_computed_has_its_compilers_figures(self, good: Run) -> None:
        (row,) = good.rows("pipelines compiled so far")
        (figures,) = [each for each in row["figures"]["pipelines"] if each["name"] == "solve_tril_64"]
        assert figures["compile_seconds"] > 0 and figures["max_total_threads_per_threadgroup"] >= 128
        assert figures["warnings"] == ""

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
        assert golden.ops_of("half_k128") == ["chunk_local_cumsum", *golden.PREFIXES]  # o, and no stage's inputs

    @pytest.mark.skipif(on_a_mac(), reason="a Mac has times")
    def test_times_of_the_simulated_device_are_left_out(self, good: Run) -> None:
        rows = [row for row in good.report["results"] if row["section"] in ("time", "timing", "model")]
        assert len(rows) > 2 and {row["status"] for row in rows} == {SKIPPED}
        assert "times on the simulated device say nothing about a Mac" in good.process.stdout

    def test_a_progress_bar_counts_the_steps(self, good: Run) -> None:
        steps = len(good.report["results"])
        assert f"{steps}/{steps}" in good.process.stderr

    def test_the_table_has_a_line_for_each_kernel_and_op(self, good: Run) -> None:
        lines = good.process.stdout.splitlines()
        (line,) = [line for line in lines if line.split()[:2] == ["recorded", "solve_tril"]]
        assert line.split()[2:4] == ["1", "pass"] and "error " in line and "bound 5.00e-06" in line


class TestOnPlantedFaults:
    def test_the_run_fails_but_ends(self, planted: Run) -> None:
        assert planted.process.returncode == 1
        assert planted.report["status"] == FAIL
        assert planted.process.stdout.splitlines()[-2].startswith("FAIL: ")

    def test_a_shader_that_does_not_compile_is_named_with_the_compilers_words(self, planted: Run) -> None:
        (row,) = planted.rows("recorded solve_tril base_k128")
        assert row["status"] == FAIL
        for words in ("could not compile solve_tril_64", "gdn/solve_tril.metal:", "error: expected ';'"):
            assert words in row["message"] and words in planted.process.stdout

    def test_a_wrong_kernel_is_named_with_error_and_bound(self, planted: Run) -> None:
        name = "recorded fused_recurrent_gated_delta_rule base_k128"
        (row,) = planted.rows(name)
        assert row["status"] == FAIL
        figures = row["figures"]["tensors"]["recurrent_o"]
        assert figures["error"] > 10 * figures["bound"]
        assert f"failed: {name}" in planted.process.stdout and "expected at most" in row["message"]

    def test_nothing_else_fails(self, planted: Run) -> None:
        failed = {(row["section"], row["group"]) for row in planted.report["results"] if row["status"] == FAIL}
        assert failed == {
            ("recorded", "solve_tril"),
            ("recorded", "chunk_gated_delta_rule:recurrent"),
            ("recorded", "fused_recurrent_gated_delta_rule"),
        }


def test_a_report_of_a_killed_check_has_what_was_known(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    process = subprocess.Popen(
        [*COMMAND, "--json", str(file), "--only", "probe"], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and not (file.is_file() and len(json.loads(file.read_text())["results"]) > 8):
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        process.kill()
        process.wait()
    report = json.loads(file.read_text())
    facts, *others = report["results"]
    assert report["status"] == "unfinished" and report["running"].startswith("probe ")
    assert facts["figures"]["machine"]["chip"]
    assert {row["status"] for row in others} == {PASS}


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
    raise Skipped("not here")


def passing(device: torch.device) -> Outcome:
    return Outcome({"device": str(device)})


def step(run: Any, section: str = "compile") -> Step:
    return Step(section, "kernel", "", run)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    # Only the hanging step takes this long. The start of a process has its own time limit.
    worker = Worker(Setup(_C.shader_directory(), simulated=None, device="cpu"), step_seconds=2)
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
        assert result.status == FAIL and "no answer within 2 s" in result.message

    def test_an_exception_is_a_failure_with_its_traceback(self) -> None:
        result = execute(step(refuse), CPU)
        assert (result.status, result.message) == (FAIL, "ValueError: expected something else")
        assert "in refuse" in result.traceback

    def test_it_is_given_up_when_every_process_dies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch_gdn_check.worker.MOST_LOSSES", 1)
        worker = Worker(Setup("", simulated={"no such setting": 1}))
        assert "the process died: exit status 1" in worker.run(step(passing)).message
        assert "not tried" in worker.run(step(passing)).message
        worker.close()

    def test_processes_beside_each_other_answer_every_step_and_one_that_dies_takes_no_other_with_it(self) -> None:
        workers = Workers(Setup(_C.shader_directory(), simulated=None, device="cpu"), 2)
        steps = [Step("compile", "kernel", str(i), crash if i == 1 else passing) for i in range(5)]
        results = sorted(workers.run(steps), key=lambda result: result.case)
        workers.close()
        assert [result.status for result in results] == [PASS, FAIL, PASS, PASS, PASS]

    def test_an_interruption_ends_steps_that_run_beside_each_other(self) -> None:
        workers = Workers(Setup(_C.shader_directory(), simulated=None, device="cpu"), 1)
        results = workers.run([step(passing), step(hang), step(hang)])
        assert next(results).status == PASS
        results.close()  # like an exception in the loop; otherwise the test takes 20 minutes
        workers.close()


def test_a_compiled_kernel_has_figures() -> None:
    mps = ready("mps")
    entry = REGISTRY["solve_tril"]
    launched = launches_at(entry, replace(entry.small, chunk_size=64), fake_mps())
    (compiles,) = plan.compiling(launched)
    assert compiles.name == "compile solve_tril 64"
    figures = execute(compiles, mps).figures
    assert figures["compile_seconds"] > 0 and figures["max_total_threads_per_threadgroup"] >= 128
    assert ("static_threadgroup_memory_length" in figures) == on_a_mac()


def test_a_wrong_variant_fails_alone_among_those_of_its_source(tmp_path: Path) -> None:
    ready("mps")
    shaders = shutil.copytree(_C.shader_directory(), tmp_path / "shaders")
    probe = "template <typename T>\n[[kernel]] void probe(device T* out [[buffer(0)]]) { out[0] = T(0); }\n"
    (shaders / "probe.metal").write_text(f'#include "core/parameters.h"\n{probe}')
    variants = [KernelVariant("probe", "probe.metal", (T,)) for T in ("float", "no_such_type", "half")]
    launches = [Launch(variant, 1, (1, 1, 1), 32) for variant in variants]
    workers = Workers(Setup(str(shaders), device_steps.simulated_settings()), 1)
    results = {result.case: result for result in workers.run(plan.compiling(launches))}
    workers.close()
    assert {case: result.status for case, result in results.items()} == {
        "float": PASS,
        "no_such_type": FAIL,
        "half": PASS,
    }
    assert "could not compile probe_no_such_type" in results["no_such_type"].message


class TestWithoutADevice:
    def run(self, *steps: Step) -> list[Result]:
        class Here:
            def run(self, step: Step) -> Result:
                return execute(step, CPU)

        report = Report("", 0.0, {}, [])
        command.Run(report).one_by_one(steps, Here())  # type: ignore[arg-type]
        return report.results

    def test_nothing_is_tried(self) -> None:
        results = self.run(step(refuse, "facts"), step(passing), step(passing, "recorded"))
        assert [result.status for result in results] == [FAIL, SKIPPED, SKIPPED]
        assert "expected something else" in results[1].message

    def test_a_device_that_pytorch_cannot_use_can_still_compile(self) -> None:
        facts, use = step(passing, "facts"), step(leave_out, "use")
        results = self.run(facts, use, step(passing), step(passing, "recorded"))
        assert [result.status for result in results] == [PASS, SKIPPED, PASS, SKIPPED]

    def test_a_virtual_machines_gpu_is_no_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def out_of_memory(device: torch.device) -> torch.Tensor:
            raise RuntimeError("MPS backend out of memory")

        monkeypatch.setattr(device_steps, "round_trip", out_of_memory)
        for is_virtual, status in ((True, SKIPPED), (False, FAIL)):
            monkeypatch.setattr(device_steps.facts, "is_virtual_mac", lambda is_virtual=is_virtual: is_virtual)
            result = execute(step(device_steps.check_use), CPU)
            assert result.status == status and "MPS backend out of memory" in result.message

    @pytest.mark.skipif(on_a_mac(), reason="a Mac has a device")
    def test_the_report_says_so(self, tmp_path: Path) -> None:
        arguments = [sys.executable, "-m", "torch_gdn", "check", "--quick", "--json", str(tmp_path / "report.json")]
        process = subprocess.run(arguments, cwd=ROOT, text=True, capture_output=True, check=False)
        assert process.returncode == 1
        simulated = "this checkout has a simulated one: python -m mps_simulator -m torch_gdn check"
        reason = f"this PyTorch has no mps device; {simulated}"
        assert process.stdout.splitlines() == [
            f"FAIL: {reason}",
            f"report: {tmp_path / 'report.json'}.",
        ]
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["status"] == FAIL
        assert [(name_of(row), row["message"]) for row in report["results"]] == [("facts this machine", reason)]


def test_without_recorded_outputs_it_is_said(tmp_path: Path) -> None:
    (recorded,) = plan.recorded(tmp_path, quick=True)
    result = execute(recorded, CPU)
    assert result.status == SKIPPED and f"no FLA outputs in {tmp_path}" in result.message


class TestTimes:
    """A step measures the same things on the CPU, where the times say nothing about a GPU."""

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timing, "WARM_SECONDS", 0.0)
        monkeypatch.setattr(timing, "COPIED_BYTES", 1 << 20)

    def test_every_op_has_times_and_a_share_of_a_copys_rate(self) -> None:
        assert {each.group for each in plan.timings(quick=True) if each.section == "time"} == REGISTRY.keys()
        for name, entry in REGISTRY.items():
            figures = timing.check_op_time(CPU, name, entry.small, repeats=1, calls=1).figures
            assert figures["encode_us"] > 0 and figures["bytes"] > 0, name
            assert figures["share_of_copy"] == pytest.approx(figures["gb_per_second"] * 1e9 / timing.copy_rate(CPU))

    def test_ops_are_timed_at_the_sizes_of_a_layer(self) -> None:
        for name, tensor, numbers in (
            ("l2norm", "x", 1024 * 32 * 128),
            ("causal_conv1d", "x", 1024 * 8192),
            ("fused_recurrent_gated_delta_rule", "v", 32 * 128),
            ("aura_encode", "x", 1024 * 3 * 128),
            ("paged_attention_", "key_cache", 2048 * 128),
        ):
            entry = REGISTRY[name]
            assert entry.call(timing.timed_point(entry))[tensor].numel() >= numbers, name

    @pytest.mark.parametrize("tokens", [1, 70])
    def test_decode_and_prefill_have_medians_ratios_and_errors(self, tokens: int) -> None:
        run = partial(timing.check_timing, shape=(1, 2, 64, 64), tokens=tokens, repeats=3, calls=2)
        result = execute(Step("timing", "decode", "model", run), CPU)
        assert result.status == PASS, result.message
        ours, theirs = result.figures["torch_gdn"], result.figures["transformers"]
        assert ours["seconds"] > 0 and 0 < ours["error"] < timing.LARGEST_ERROR
        assert theirs["ratio"] == pytest.approx(theirs["seconds"] / ours["seconds"])
        mlx = result.figures["mlx"]
        assert mlx["error"] < timing.LARGEST_ERROR if "error" in mlx else mlx["skipped"]
        assert result.figures["state_bytes"] == 2 * 4 * 2 * 64 * 64
        assert f"tokens {tokens}, " in table([result])[1] and "transformers ratio" in table([result])[1]

    def test_a_wrong_result_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = timing.torch_gdn.fused_recurrent_gated_delta_rule

        def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
            return right(q, k, 1.1 * v, **options)

        monkeypatch.setattr(timing.torch_gdn, "fused_recurrent_gated_delta_rule", wrong)
        outcome = timing.check_timing(CPU, (1, 2, 64, 64), tokens=1, repeats=1, calls=1)
        assert outcome.problem.startswith("torch_gdn's output has error")

    def test_a_model_has_tokens_per_second_with_and_without_torch_gdn(self) -> None:
        figures = models.check_model(CPU, prompt=16, new=2).figures["tokens_per_second"]
        assert figures.keys() == {"transformers", "torch_gdn"}
        assert all(value > 0 for each in figures.values() for value in each.values())

    def test_the_tuning_is_reported_and_kept_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timing.tune.tuning_cache, "write", lambda *_: pytest.fail("written"))
        figures = timing.check_tuning(CPU, (1, 2, 32, 32), 8).figures
        assert figures["algorithm"] in _C.prefill_algorithms() and len(figures["seconds"]) == 5

    def test_first_calls_are_timed_in_processes_whose_shaders_no_cache_has(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts = []

        def started(shaders: Path) -> dict[str, float]:
            texts.append((shaders / "gdn" / "solve_tril.metal").read_text())
            return {"first": 2.0 / len(texts)}

        monkeypatch.setattr(first_call, "in_a_new_process", started)
        assert first_call.cold_and_cached() == {"cold": {"first": 2.0}, "second process": {"first": 1.0}}
        assert texts[0] == texts[1] != (ROOT / "shaders/gdn/solve_tril.metal").read_text()

    def test_first_calls_of_a_new_process(self) -> None:
        ready("mps")
        seconds = first_call.in_a_new_process(Path(_C.shader_directory()))
        assert len(seconds) == 4 and all(each > 0 for each in seconds.values())

    def test_a_process_that_fails_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "false")
        with pytest.raises(RuntimeError, match="the process of the first calls ended with 1"):
            first_call.in_a_new_process(Path())

    def test_what_cannot_run_here_has_no_time(self) -> None:
        runs = timing.prepared_function(lambda: torch.ones(1, 2))
        figures = timing.compared({"torch_gdn": runs, "mlx": "no mlx"}, torch.ones(2), CPU, repeats=1, calls=1).figures
        assert figures["mlx"] == {"skipped": "no mlx"} and figures["fastest"] == "torch_gdn"


def test_the_end_of_a_long_prompt_is_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not comparisons.check_long_prompt(CPU, "recurrent", tokens=400).problem
    right = comparisons.END_TO_END_OPS["chunk_gated_delta_rule"]

    def stopped(*tensors: torch.Tensor, **options: Any) -> Any:
        o, state = right(*tensors, **options)
        return torch.cat([o[:, :-10], torch.zeros_like(o[:, -10:])], dim=1), state

    monkeypatch.setitem(comparisons.END_TO_END_OPS, "chunk_gated_delta_rule", stopped)
    assert "o: error" in comparisons.check_long_prompt(CPU, "recurrent", tokens=400).problem


class TestReferences:
    """Tests that no reference is computed on the device that it judges."""

    def references(self, device: torch.device) -> dict[str, Callable[[], Any]]:
        entry = REGISTRY["l2norm"]
        inputs = to_device(timing.layer_inputs((1, 2, 64, 64), tokens=3), device)
        case, layer_there = make_case(3).to(device), layer.GatedDeltaNet().to(device)
        x = torch.randn(1, 3, 64).to(device)
        return {
            "an op's": lambda: entry.exact_outputs(to_device(entry.call(entry.small), device)),
            "the recurrence": case.exact,
            "of timings": lambda: timing.exact_output(inputs),
            "of the layer": lambda: layer.in_float64(layer_there, x),
        }

    @pytest.mark.parametrize("which", ["an op's", "the recurrence", "of timings", "of the layer"])
    def test_it_is_refused_on_mps(self, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
        monkeypatch.setattr(torch.Tensor, "double", torch.Tensor.float)  # so that it does not refuse float64
        monkeypatch.setattr(torch.nn.Module, "double", torch.nn.Module.float)
        with pytest.raises(RuntimeError, match="expected a reference to be computed on the CPU, got a tensor on mps"):
            self.references(ready("mps"))[which]()


def test_the_layer_compiles_without_a_graph_break() -> None:
    assert not layer.check_layer(CPU, backend="aot_eager").problem


def test_the_layer_fails_when_the_compiled_one_differs() -> None:
    def broken(by: Callable[[Any], int]) -> Any:
        """Returns a backend whose graphs are off by a number."""
        return lambda graph, inputs: lambda *tensors: [x + by(graph) for x in graph(*tensors)]

    with_ops = broken(lambda graph: "gdn" in graph.code)
    assert "output: error" in layer.check_layer(CPU, backend=with_ops).problem
    with pytest.raises(Skipped, match="Inductor fails without torch_gdn's ops too: output: error"):
        layer.check_layer(CPU, backend=broken(lambda graph: 1))


class TestTwoReports:
    def write(self, path: Path, status: str, seconds: float, error: float) -> str:
        tensors = {"tensors": {"o": {"error": error, "bound": 1e-3, "of": "head 0"}}}
        results = [
            Result("probe", "denormals", "", status, figures={"measured": {"half read": seconds}}),
            Result("seeded", "l2norm", "bfloat", PASS, figures=tensors),
            Result("compile", "l2norm", "bfloat_64", PASS, figures={"compile_seconds": seconds}),
        ]
        Report("2026-01-01T00:00:00+00:00", 1.0, {}, results).write(path)
        return str(path)

    def test_they_stand_side_by_side(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        one = self.write(tmp_path / "m1.json", PASS, 1.5, 1e-4)
        other = self.write(tmp_path / "m5.json", FAIL, 2.5, float("nan"))
        assert command.main(["--compare", one, other]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines == [
            ["m1.json", "m5.json"],
            ["status", "pass", "FAIL"],
            ["seconds", "1", "1"],
            ["probe", "denormals", "pass", "FAIL"],
            ["probe", "denormals:", "half", "read", "1.5", "2.5"],
            [
                "seeded",
                "l2norm",
                "bfloat",
                *("pass,", "0.1", "of", "the", "bound"),
                *("pass,", "inf", "of", "the", "bound"),
            ],
        ]

    def test_what_is_no_report_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        one = self.write(tmp_path / "m1.json", PASS, 1.5, 1e-4)
        (tmp_path / "none.json").write_text("[]")
        with pytest.raises(SystemExit) as exit_status:
            command.main(["--compare", one, str(tmp_path / "none.json")])
        assert exit_status.value.code == 2
        assert f"a report that `torch_gdn check` wrote, got {tmp_path / 'none.json'}" in capsys.readouterr().err


def test_a_pattern_without_a_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    ready("mps")
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["--quick", "--only", "no such step"])
    assert "--only: no step has a name that matches" in capsys.readouterr().err


def test_options_choose_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready("mps")
    chosen: list[Any] = []

    def checked(options: Any, steps: list[Step], no_device: str) -> Report:
        chosen.append((steps[0].run, len(command.compiling_steps(options, no_device))))
        return Report("", 0.0, {}, [])

    monkeypatch.setattr(command, "check", checked)
    monkeypatch.setattr(plan, "steps", lambda *given: [step(given, "seeded")])
    monkeypatch.setattr(plan, "compile_steps", lambda: [step(passing)])
    for options in ([], ["--quick", "--golden", str(tmp_path)]):
        command.main(["--json", str(tmp_path / "report.json"), *options])
    assert chosen == [((golden.FOLDER, False), 1), ((tmp_path, True), 0)]


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_a_report_is_asked_for_on_a_mac_only(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check", lambda *_: Report("", 0.0, {}, []))
    monkeypatch.setattr(command, "why_no_mps", lambda _: "no device")
    monkeypatch.setattr(sys, "platform", system)
    command.main(["--json", str(tmp_path / "report.json")])
    assert ("attach it to a torch_gdn issue" in capsys.readouterr().out) == (system == "darwin")
