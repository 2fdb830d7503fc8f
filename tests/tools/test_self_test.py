"""Tests the self-test: it finds a shader that does not compile or computes wrong numbers, and something else runs."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_gdn
from engines.tests import test_vllm_gated_delta_net as vllm_layer
from engines.tests.test_vllm_gated_delta_net import DECODES
from engines.tests.test_vllm_gated_delta_net import PREFILLS as PREFILLED
from tests.helpers.devices import kernels_run, ready
from tests.helpers.files import copied_shaders, replace_once
from torch_gdn import _C, prefill_algorithm, self_test
from torch_gdn.aura import tested as aura_tested
from torch_gdn.integrations.serving import working_variants
from torch_gdn.integrations.transformers import functions
from torch_gdn.self_test import replace as replacing
from torch_gdn.self_test import run, verdicts
from torch_gdn.self_test.cases import Case, cases_of, cases_of_calls
from torch_gdn.tools import info, tuning_cache
from torch_gdn_check.registry import REGISTRY, OpEntry, inputs
from torch_gdn_check.registry.bounds import relative_error
from torch_gdn_check.registry.decode import DecodePoint
from torch_gdn_check.registry.gdn import ALGORITHMS, CHUNK, STAGES, RulePoint
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.layers import ConvolutionPoint, RowPoint
from torch_gdn_engines.vllm import gated_delta_net

Plant = Callable[..., None]
RULE = RulePoint(K=32, V=32, tokens=20)
PREFILLS = [Case(CHUNK, replace(RULE, algorithm=each)) for each in ALGORITHMS]
DECODE, DECODE_ = (Case(f"fused_recurrent_gated_delta_rule{x}", replace(RULE, tokens=2)) for x in ("", "_"))
NORM = Case("rms_norm_gated", RowPoint(D=32))
UPDATE = Case("causal_conv1d_update_", ConvolutionPoint(tokens=1))
# For each shader, a change that makes its numbers wrong.
WRONG = {
    "gdn/fused_chunk_gated_delta_rule": (
        "store_even_fragment(own_values, kValueStride, at, output)",
        "output",
        "wanted",
    ),
    "gdn/fused_recurrent_gated_delta_rule": ("= parameters.scale * update_and_read", "parameters.scale", "1.1f"),
    "layers/rms_norm_gated": ("1.0f / (1.0f + gate_exp(-logit.at[i]))", "(1.0f +", "(1.1f +"),
    "aura/aura_encode": ("half(norm / kept_norm * grow)", "norm /", "1.1f * norm /"),
    "layers/causal_conv1d_update": ("(window, filter, parameters.has_silu != 0)", "!= 0", "== 0"),
}
each_fault = pytest.mark.parametrize("compiles", [False, True], ids=["does not compile", "wrong numbers"])


def forget() -> None:
    """Forgets everything, as a new process would."""
    replacing.restore()
    run._known.clear()
    run._warned.clear()
    aura_tested.tested.clear()
    _C.clear_pipelines()


@pytest.fixture
def on_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    """Runs on mps with separate verdicts."""
    device = ready("mps")
    monkeypatch.setenv(self_test.VARIABLE, "auto")
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "table.json"))
    forget()
    yield device
    forget()


@pytest.fixture
def plant(on_mps: torch.device, tmp_path: Path) -> Iterator[Plant]:
    with copied_shaders(tmp_path) as folder:

        def in_shader(name: str, compiles: bool) -> None:
            file = folder / f"{name}.metal"
            if compiles:
                line, old, new = WRONG[name]
                replace_once(file, line, line.replace(old, new))
            else:
                file.write_text(f"#error planted\n{file.read_text()}")
            forget()

        yield in_shader


def ensure(*cases: Case) -> str:
    """Runs the self-test and returns its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        self_test.ensure(lambda: cases)
    return " ".join(str(each.message) for each in caught)


def computed(case: Case, device: torch.device, **options: Any) -> tuple[Call, dict[str, Tensor]]:
    """Returns a call of the op with its inputs on the CPU, and its results there."""
    entry = REGISTRY[case.op]
    call = entry.call(case.point) | options
    there = to_device(call, device)
    return call, {name: x.cpu() for name, x in entry.outputs(there, entry.overload(**there)).items()}


def assert_exact(case: Case, device: torch.device, **options: Any) -> None:
    call, found = computed(case, device, **options)
    assert [str(part) for part in REGISTRY[case.op].compared(case.point, call, found) if not part.kept] == []


def matches_the_cpu(case: Case, device: torch.device, **options: Any) -> bool:
    """Compares bit for bit. No kernel of the device has the CPU's bits."""
    on_device, on_cpu = (computed(case, torch.device(each), **options)[1] for each in (device, "cpu"))
    return on_device.keys() == on_cpu.keys() and all(torch.equal(x, on_cpu[name]) for name, x in on_device.items())


@each_fault
def test_another_prefill_algorithm_takes_the_place(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("gdn/fused_chunk_gated_delta_rule", compiles)
    warned = ensure(*PREFILLS)
    assert "chunk_gated_delta_rule:fused_chunk: " in warned and "chunked or recurrent runs instead" in warned
    assert ("planted" if not compiles else "o: error") in warned
    assert not compiles or 0 < float(warned.split("expected at most ")[1].split(";")[0]) < 0.1
    for algorithm in (None, "fused_chunk"):  # the heuristic takes fused_chunk
        with prefill_algorithm(algorithm), kernels_run(on_mps, "chunk_fwd_h"):
            assert_exact(PREFILLS[0], on_mps)
    of_another_size = Case(CHUNK, replace(RULE, V=16, algorithm="fused_chunk"))
    ensure(of_another_size)  # tests this algorithm, not its replacement
    assert verdicts.read(verdicts.machine())[of_another_size.name].problem


@each_fault
def test_a_prefill_algorithm_takes_the_place_of_decoding(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("gdn/fused_recurrent_gated_delta_rule", compiles)
    ensure(DECODE, DECODE_)
    for case in (DECODE, DECODE_):
        with kernels_run(on_mps, "fused_chunk_gated_delta_rule"):
            assert_exact(replace(case, point=replace(case.point, algorithm="fused_chunk")), on_mps)
    gates = {"gk": torch.zeros(1, 2, 2, 32)}  # no prefill takes these
    assert matches_the_cpu(DECODE, on_mps, **gates)
    with pytest.raises(RuntimeError, match=r"^fused_recurrent_gated_delta_rule_: its kernel failed the self-test"):
        computed(DECODE_, on_mps, **gates)


@each_fault
def test_the_cpu_takes_the_place(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("layers/rms_norm_gated", compiles)
    assert "rms_norm_gated: " in ensure(NORM)
    assert matches_the_cpu(NORM, on_mps)
    call = REGISTRY[NORM.op].call(NORM.point)
    compiled = torch.compile(lambda x, g, weight: torch_gdn.rms_norm_gated(x, g, weight) + 1, backend="aot_eager")
    expected = torch_gdn.rms_norm_gated(call["x"], call["g"], call["weight"]) + 1
    assert torch.equal(compiled(*(call[name].to(on_mps) for name in ("x", "g", "weight"))).cpu(), expected)


@each_fault
def test_an_error_takes_the_place_of_an_op_that_writes(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    """Models of transformers then use transformers' own function."""
    plant("layers/causal_conv1d_update", compiles)
    assert "calls raise an error" in ensure(UPDATE)
    device = _C.device_facts()["name"]
    problem = r"(y|state_pool): error \S+ of [\w ]+, expected at most" if compiles else ".*planted"
    words = rf"^causal_conv1d_update_: its kernel failed the self-test on {device}.*: {problem}.*torch_gdn check"
    with pytest.raises(RuntimeError, match=words):
        computed(UPDATE, on_mps)
    x, state, weight = torch.zeros(1, 8, 1), torch.zeros(1, 8, 4), torch.zeros(8, 4)
    reason = functions.update_reason(x.to(on_mps), state.to(on_mps), weight.to(on_mps))
    assert reason == "causal_conv1d_update_ failed the self-test on this device"
    assert functions.update_reason(x, state, weight) == ""


def test_no_prefill_algorithm_is_left(on_mps: torch.device, plant: Plant) -> None:
    plant("gdn/chunk_fwd_h", compiles=False)
    ensure(*PREFILLS)
    states = {"return_intermediate_states": True}  # only chunked has them
    assert not matches_the_cpu(PREFILLS[0], on_mps)
    assert matches_the_cpu(PREFILLS[0], on_mps, **states)
    for kernel in ("fused_chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        plant(f"gdn/{kernel}", compiles=False)
    ensure(*PREFILLS, DECODE, DECODE_)
    assert matches_the_cpu(PREFILLS[0], on_mps)
    call = to_device(REGISTRY[DECODE.op].call(DECODE.point), on_mps)
    start = call["initial_state"].clone()
    cached = {functions.CACHED_STATE: call["initial_state"]}  # a model of transformers updates it in place
    _, state = functions.run_rule(
        DECODE.op, *(call.pop(name) for name in ("q", "k", "v", "g", "beta")), **call, **cached
    )
    assert torch.equal(state.cpu(), computed(DECODE, torch.device("cpu"))[1]["final_state"])
    assert torch.equal(call["initial_state"].cpu(), start.cpu())
    with pytest.raises(RuntimeError, match=r"^chunk_gated_delta_rule_: its kernel failed the self-test"):
        computed(replace(PREFILLS[0], op="chunk_gated_delta_rule_"), on_mps)


def test_a_verdict_is_kept_for_its_machine(
    on_mps: torch.device, plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tested: list[str] = []
    problem_of = run.problem_of

    def counted(case: Case) -> str:
        tested.append(case.op)
        return problem_of(case)

    monkeypatch.setattr(run, "problem_of", counted)
    plant("layers/rms_norm_gated", compiles=True)
    warned = ensure(NORM)
    assert "\n" not in warned and verdicts.machine() in warned and "rms_norm_gated: y: error" in warned
    assert ensure(NORM) == "" and tested == [NORM.op]  # it warns once
    forget()
    assert ensure(NORM) == warned and tested == [NORM.op]
    assert matches_the_cpu(NORM, on_mps)
    forget()
    monkeypatch.setattr(verdicts, "__version__", "0.0.0")  # torch_gdn's
    ensure(NORM)
    assert tested == 2 * [NORM.op]
    monkeypatch.setenv(self_test.VARIABLE, "again")
    forget()
    ensure(NORM)
    assert tested == 3 * [NORM.op]
    assert [
        each
        for each in info.self_tested()
        if each.startswith("FAILED: rms_norm_gated: y: error") and "the CPU's kernel runs instead" in each
    ]
    assert "rms_norm_gated" in self_test.replaced
    monkeypatch.setenv(self_test.VARIABLE, "off")
    forget()
    assert ensure(NORM) == "" and not self_test.replaced
    monkeypatch.setenv(self_test.VARIABLE, "on")
    with pytest.raises(ValueError, match=r"^TORCH_GDN_SELF_TEST: expected one of auto, again, off, got 'on'"):
        ensure(NORM)


def test_a_test_that_ended_its_process_failed(on_mps: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    key = verdicts.machine()
    monkeypatch.setattr(run, "problem_of", lambda case: "")
    for process, fails in ((gone.pid, True), (os.getpid(), True), (os.getppid(), False)):
        verdicts.write(key, {NORM.name: verdicts.Verdict(NORM.op, None, running=process)})
        forget()
        assert ("the process ended while the test ran" in ensure(NORM)) == fails
        assert bool(verdicts.read(key)[NORM.name].problem) == fails
    verdicts.path(key).write_text("{")
    forget()
    assert ensure(NORM) == ""
    assert verdicts.settled(key) == {NORM.name: verdicts.Verdict(NORM.op, None)}


@each_fault
def test_warm_up_of_vllm_replaces_what_its_layers_call(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("gdn/fused_recurrent_gated_delta_rule", compiles)

    def forward(device: torch.device) -> Tensor:
        torch.manual_seed(0)
        layer, metadata = vllm_layer.layer_on(device), vllm_layer.batch_of(DECODES, PREFILLED, [], device)
        x, b, a = (torch.randn(metadata.num_actual_tokens, n).to(device) for n in (vllm_layer.D, *2 * [vllm_layer.HV]))
        out = torch.zeros(len(x), vllm_layer.HV, vllm_layer.V, device=device)
        gated_delta_net.forward(layer, metadata, x, b, a, out)
        return out.cpu()

    with pytest.warns(
        UserWarning, match="fused_recurrent_gated_delta_rule_: .*; another prefill algorithm runs instead"
    ):
        kernels = {each.kernel for each in working_variants(lambda: forward(on_mps))}
    assert "fused_chunk_gated_delta_rule" in kernels and "fused_recurrent_gated_delta_rule" not in kernels
    tested = verdicts.read(verdicts.machine())
    assert "fused_recurrent_gated_delta_rule_ float, K 32, V 48, state_v_first, normalise, tokens 3" in tested
    assert relative_error(forward(on_mps), forward(torch.device("cpu"))) < 1e-6


@each_fault
def test_a_cache_of_codes_tests_its_ops_in_its_form(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("aura/aura_encode", compiles)
    with pytest.warns(UserWarning, match="aura_encode_: .*; calls raise an error"):
        cache = torch_gdn.aura.KVCache("8v4", 1, 1, 64, 8, on_mps, torch.float16, tail=0, sinks=0)
    rows = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=on_mps)
    with pytest.raises(RuntimeError, match=r"^aura_encode_: its kernel failed the self-test on"):
        cache.append(rows, rows)
    stored = verdicts.read(verdicts.machine())
    assert {x.op for x in stored.values()} == {"aura_encode_", "aura_decode", "aura_attention", "paged_attention_"}
    assert all(name.startswith(f"{x.op} half, ") for name, x in stored.items())
    assert {x.op for x in stored.values() if x.problem} == {"aura_encode_"}


def test_sizes_that_an_op_refuses_are_no_fault_of_a_kernel(on_mps: torch.device) -> None:
    too_large = Case("gdn_decode_", DecodePoint(K=256, tokens=1))
    with pytest.raises(ValueError, match="state_pool"):
        computed(too_large, on_mps)
    assert ensure(too_large) == "" and not self_test.replaced


def test_a_test_inside_a_recording_runs(on_mps: torch.device) -> None:
    with torch_gdn.recording() as recorded:
        assert ensure(NORM) == ""
    assert recorded.launches == []
    assert verdicts.read(verdicts.machine())[NORM.name].problem == ""


class Zeros(TorchDispatchMode):
    """A mode that returns something other than what operators compute, like a mode that counts them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return torch.zeros_like(found) if func.namespace == "gdn" else found


def test_a_test_inside_a_dispatch_mode_sees_what_the_kernel_computes(on_mps: torch.device) -> None:
    with Zeros():
        assert ensure(NORM) == ""
    assert verdicts.read(verdicts.machine())[NORM.name].problem == ""


def test_an_interrupted_test_has_no_verdict(on_mps: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(case: Case) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "problem_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure(NORM)
    assert verdicts.read(verdicts.machine()) == {}


def test_the_programs_defaults_change_nothing(on_mps: torch.device) -> None:
    before = torch.get_rng_state()
    with torch.device(on_mps):
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert ensure(*cases_of(["aura_rotate"])) == ""
            assert torch.get_default_dtype() == torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_a_device_that_cannot_be_used_is_no_fault_of_a_kernel(
    on_mps: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("not on this machine")

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("MPS backend out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(inputs, "to_device", refused)
        assert "could not test 2 of 2 kernels. rms_norm_gated float, D 32: RuntimeError: not on" in ensure(NORM, UPDATE)
    assert not self_test.replaced and not verdicts.read(verdicts.machine())
    monkeypatch.setattr(OpEntry, "run", no_memory)
    forget()
    assert "could not test 1 of 1 kernels" in ensure(NORM)


def test_a_machine_without_mps_asks_for_no_cases(on_mps: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    self_test.ensure(lambda: pytest.fail("it asked"))


def test_ops_have_cases_in_the_dtype_and_sizes_of_a_call() -> None:
    for op in REGISTRY.keys() - set(STAGES):  # no model calls the stages
        entry = REGISTRY[op]
        with cases_of_calls() as calls:
            entry.run(entry.call(entry.small), entry.small)
        assert {case.op for case in calls.cases} == {op}
        assert len(calls.cases) <= len(cases_of([op]))  # points that differ only within a call become one
        for case in calls.cases:
            drawn = entry.call(case.point)
            assert drawn[entry.first].dtype == entry.call(entry.small)[entry.first].dtype
