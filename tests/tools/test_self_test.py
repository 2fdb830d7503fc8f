"""Tests the self-test: it finds a shader that does not compile or computes wrong numbers, and something else runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_gdn
from engines.tests import test_vllm_gated_delta_net as vllm_layer
from engines.tests.test_vllm_gated_delta_net import DECODES
from engines.tests.test_vllm_gated_delta_net import PREFILLS as PREFILLED
from tests.helpers.devices import kernels_run, ready
from tests.helpers.errors import assert_same_bits
from tests.helpers.files import copied_shaders, replace_once
from torch_gdn import _C, prefill_algorithm, self_test
from torch_gdn.integrations.serving import working_variants
from torch_gdn.integrations.transformers import functions
from torch_gdn.self_test import shadow, verdicts
from torch_gdn.tools import info, tuning_cache
from torch_gdn_check.registry import REGISTRY, OpEntry, Point
from torch_gdn_check.registry.bounds import relative_error
from torch_gdn_check.registry.gdn import ALGORITHMS, CHUNK, RulePoint
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.layers import ConvolutionPoint, RowPoint
from torch_gdn_engines.vllm import gated_delta_net

Plant = Callable[..., None]


@dataclass(frozen=True)
class Case:
    op: str
    point: Point

    @property
    def entry(self) -> OpEntry[Any]:
        return REGISTRY[self.op]


RULE = RulePoint(K=32, V=32, tokens=20)
PREFILLS = [Case(CHUNK, replace(RULE, algorithm=each)) for each in ALGORITHMS]
DECODE, DECODE_ = (Case(f"fused_recurrent_gated_delta_rule{x}", replace(RULE, tokens=2)) for x in ("", "_"))
NORM = Case("rms_norm_gated", RowPoint(D=32))
UPDATE = Case("causal_conv1d_update_", ConvolutionPoint(tokens=1))
# For each shader, a change that makes its numbers wrong.
WRONG = {
    "gdn/fused_chunk_gated_delta_rule": ("kValueStride, at, output)", "output", "wanted"),
    "gdn/fused_recurrent_gated_delta_rule": ("= parameters.scale * update_and_read", "parameters.scale", "1.1f"),
    "gdn/fused_recurrent_gated_delta_rule_token": ("T(parameters.scale * read)", "parameters.scale", "1.1f"),
    "attention/reshape_and_cache": ("source + head * source_head + column", "+ column", "+ 0 * column"),
    "attention/paged_attention_prefill": ("source = cache + offsets[key] + column", "+ column", "+ 0 * column"),
    "quantized/quantized_linear": ("T(sum + bias_at(bias, parameters, own_row))", "sum", "1.1f * sum"),
    "experts/moe_down": ("for (int j = 0; j < pairs.k; ++j)", "pairs.k", "pairs.k - 1"),
    "gdn/chunk_bwd_dv_local": ("columns, 8, at, sum)", "sum", "2.0f * sum"),
    "layers/causal_conv1d_bwd": ("= T(gradient);", "gradient", "1.1f * gradient"),
    "layers/rms_norm_gated": ("1.0f / (1.0f + gate_exp(-logit.at[i]))", "(1.0f +", "(1.1f +"),
    "layers/causal_conv1d_update": ("(window, filter, parameters.has_silu != 0)", "!= 0", "== 0"),
}
KINDS = {
    "attention/reshape_and_cache": "reshape_and_cache_",  # returns nothing
    "attention/paged_attention_prefill": "paged_attention_",
    "quantized/quantized_linear": "quantized_linear",
    "experts/moe_down": "moe_down",
    "gdn/chunk_bwd_dv_local": "chunk_gated_delta_rule_bwd",
    "layers/causal_conv1d_bwd": "causal_conv1d_bwd",
}
each_fault = pytest.mark.parametrize("compiles", [False, True], ids=["does not compile", "wrong numbers"])


def forget() -> None:
    """Forgets everything, as a new process would."""
    self_test.install()
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


def computed(case: Case, device: str | torch.device = "mps", **options: Any) -> tuple[Call, dict[str, Tensor]]:
    """Returns a call of the op with its inputs on the CPU, and its results there."""
    call = case.entry.call(case.point) | options
    on_device = to_device(call, torch.device(device))
    with case.point.context():
        results = case.entry.overload(**on_device)
    return call, {name: x.cpu() for name, x in case.entry.outputs(on_device, results).items()}


def warned(*cases: Case) -> str:
    """Calls each op on mps, and returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case in cases:
            computed(case)
    return " ".join(str(each.message) for each in caught)


def assert_exact(case: Case, **options: Any) -> None:
    call, result = computed(case, **options)
    assert [str(part) for part in case.entry.compared(case.point, call, result) if not part.kept] == []


def matches_the_cpu(case: Case, **options: Any) -> bool:
    """Compares bit for bit. No kernel of the device has the CPU's bits."""
    on_device, on_cpu = (computed(case, each, **options)[1] for each in ("mps", "cpu"))
    return on_device.keys() == on_cpu.keys() and all(torch.equal(x, on_cpu[name]) for name, x in on_device.items())


def stored() -> dict[str, str]:
    """Returns the problems by op and variant."""
    return {name: each.problem for name, each in verdicts.read(verdicts.machine()).items()}


@each_fault
def test_another_prefill_algorithm_takes_the_place(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("gdn/fused_chunk_gated_delta_rule", compiles)
    words = warned(*PREFILLS)
    assert "chunk_gated_delta_rule:fused_chunk: " in words and "chunked or recurrent runs instead" in words
    assert ("planted" if not compiles else "o: error") in words
    for algorithm in (None, "fused_chunk"):  # the heuristic takes fused_chunk
        with prefill_algorithm(algorithm), kernels_run(on_mps, "chunk_fwd_h"):
            assert_exact(replace(PREFILLS[0], point=RULE))
    assert {name.split(" ")[1].split("_float")[0] for name, problem in stored().items() if problem} == {
        "fused_chunk_gated_delta_rule"
    }


@each_fault
def test_a_prefill_algorithm_takes_the_place_of_decoding(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("gdn/fused_recurrent_gated_delta_rule", compiles)
    warned(DECODE, DECODE_)
    for case in (DECODE, DECODE_):
        with kernels_run(on_mps, "fused_chunk_gated_delta_rule"):
            assert_exact(replace(case, point=replace(case.point, algorithm="fused_chunk")))
    gates = {"gk": torch.zeros(1, 2, 2, 32)}  # no prefill takes these
    assert matches_the_cpu(DECODE, **gates)
    assert matches_the_cpu(DECODE_, **gates)


@each_fault
def test_the_cpu_takes_the_place_from_the_first_call_on(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("layers/rms_norm_gated", compiles)
    with pytest.warns(UserWarning, match=r"rms_norm_gated: .*; the CPU's kernel runs instead, on copies"):
        assert matches_the_cpu(NORM)
    assert matches_the_cpu(NORM)
    call = NORM.entry.call(NORM.point)
    compiled = torch.compile(lambda x, g, weight: torch_gdn.rms_norm_gated(x, g, weight) + 1, backend="aot_eager")
    expected = torch_gdn.rms_norm_gated(call["x"], call["g"], call["weight"]) + 1
    assert torch.equal(compiled(*(call[name].to(on_mps) for name in ("x", "g", "weight"))).cpu(), expected)


@each_fault
def test_the_cpu_takes_the_place_of_an_op_that_writes(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    """Models of transformers then use transformers' own function."""
    plant("layers/causal_conv1d_update", compiles)
    problem = r"(y|state_pool): error \S+, expected at most" if compiles else ".*planted"
    with pytest.warns(UserWarning, match=f"causal_conv1d_update_: {problem}.*torch_gdn check"):
        assert matches_the_cpu(UPDATE)
    assert matches_the_cpu(UPDATE)
    x, state, weight = torch.zeros(1, 8, 1), torch.zeros(1, 8, 4), torch.zeros(8, 4)
    reason = functions.update_reason(x.to(on_mps), state.to(on_mps), weight.to(on_mps))
    assert reason == "causal_conv1d_update_ failed the self-test on this device"
    assert functions.update_reason(x, state, weight) == ""


def test_no_prefill_algorithm_is_left(on_mps: torch.device, plant: Plant) -> None:
    plant("gdn/chunk_fwd_h", compiles=False)
    warned(*PREFILLS)
    plain = replace(PREFILLS[0], point=RULE)
    states = {"return_intermediate_states": True}  # only chunked has them
    assert not matches_the_cpu(plain)
    assert matches_the_cpu(plain, **states)
    for kernel in ("fused_chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        plant(f"gdn/{kernel}", compiles=False)
    warned(*PREFILLS, DECODE, DECODE_)
    assert matches_the_cpu(plain)
    call = to_device(DECODE.entry.call(DECODE.point), on_mps)
    start = call["initial_state"].clone()
    cached = {functions.CACHED_STATE: call["initial_state"]}  # a model of transformers updates it in place
    _, state = functions.run_rule(
        DECODE.op, *(call.pop(name) for name in ("q", "k", "v", "g", "beta")), **call, **cached
    )
    assert torch.equal(state.cpu(), computed(DECODE, "cpu")[1]["final_state"])
    assert torch.equal(call["initial_state"].cpu(), start.cpu())
    assert matches_the_cpu(replace(plain, op="chunk_gated_delta_rule_"))


def count_tests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ops: list[str] = []
    tested = self_test.tested

    def counted(verdict: verdicts.Verdict, *others: Any) -> Any:
        ops.append(verdict.op)
        return tested(verdict, *others)

    monkeypatch.setattr(self_test, "tested", counted)
    return ops


def test_a_verdict_is_kept_for_its_machine(on_mps: torch.device, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = count_tests(monkeypatch)
    plant("layers/rms_norm_gated", compiles=True)
    words = warned(NORM)
    assert "\n" not in words and verdicts.machine() in words and "rms_norm_gated: result: error" in words
    assert warned(NORM) == "" and tests == [NORM.op]  # it warns once
    forget()
    assert warned(NORM) == words and tests == [NORM.op]
    assert matches_the_cpu(NORM)
    forget()
    monkeypatch.setattr(verdicts, "__version__", "0.0.0")  # torch_gdn's
    warned(NORM)
    assert tests == 2 * [NORM.op]
    monkeypatch.setenv(self_test.VARIABLE, "again")
    forget()
    warned(NORM)
    assert tests == 3 * [NORM.op]
    assert [
        each
        for each in info.self_tested()
        if each.startswith("FAILED: rms_norm_gated: result: error") and "the CPU's kernel runs instead" in each
    ]
    assert "rms_norm_gated" in self_test.replaced


def test_it_can_be_turned_off(on_mps: torch.device, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("layers/rms_norm_gated", compiles=True)
    monkeypatch.setenv(self_test.VARIABLE, "off")
    assert warned(NORM) == "" and stored() == {} and not self_test.replaced
    monkeypatch.setenv(self_test.VARIABLE, "on")
    forget()
    with pytest.raises(ValueError, match=r"TORCH_GDN_SELF_TEST: expected one of auto, again, off, got 'on'"):
        computed(NORM)


def test_a_test_that_ended_its_process_failed(on_mps: torch.device) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    warned(NORM)
    key, [name] = verdicts.machine(), stored()
    for process, fails in ((gone.pid, True), (os.getpid(), True), (os.getppid(), False)):
        verdicts.change(key, {name: verdicts.Verdict(NORM.op, None, running=process)})
        forget()
        assert ("the process ended while the test ran" in warned(NORM)) == fails
    verdicts.path(key).write_text("{")  # is read as no verdicts
    forget()
    assert warned(NORM) == "" and stored() == {name: ""}


def test_two_processes_that_store_at_once_keep_both_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one writes what it read before the other's test ended, and the other seems to have crashed."""
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "table.json"))
    read, key = verdicts.read, "a machine"
    others: list[threading.Thread] = []

    def slow(key: str) -> verdicts.Verdicts:
        result = read(key)
        if not others:
            others.append(threading.Thread(target=verdicts.change, args=(key, {"b": verdicts.Verdict("b", None)})))
            others[0].start()
            others[0].join(0.5)
        return result

    monkeypatch.setattr(verdicts, "read", slow)
    verdicts.change(key, {"a": verdicts.Verdict("a", None)})
    others[0].join()
    assert read(key).keys() == {"a", "b"}


def test_a_running_test_is_in_the_file(on_mps: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []

    def noted(op: str, call: Call) -> Any:
        running.extend(each.running for each in verdicts.read(verdicts.machine()).values())
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "trusted", noted)
    with pytest.raises(KeyboardInterrupt):
        computed(NORM)
    assert running == [os.getpid()] and stored() == {}


@each_fault
def test_vllm_runs_and_compiles_what_replaces_a_kernel(on_mps: torch.device, plant: Plant, compiles: bool) -> None:
    plant("gdn/fused_recurrent_gated_delta_rule_token", compiles)

    def forward(device: torch.device) -> Tensor:
        torch.manual_seed(0)
        layer, metadata = vllm_layer.layer_on(device), vllm_layer.batch_of(DECODES, PREFILLED, [], device)
        x, b, a = (torch.randn(metadata.num_actual_tokens, n).to(device) for n in (vllm_layer.D, *2 * [vllm_layer.HV]))
        out = torch.zeros(len(x), vllm_layer.HV, vllm_layer.V, device=device)
        gated_delta_net.forward(layer, metadata, x, b, a, out)
        return out.cpu()

    with pytest.warns(UserWarning, match="fused_recurrent_gated_delta_rule_: .*; another prefill algorithm runs"):
        first = forward(on_mps)
    expected = forward(torch.device("cpu"))
    assert relative_error(first, expected) < 1e-6
    assert relative_error(forward(on_mps), expected) < 1e-6
    forget()
    with pytest.warns(UserWarning, match="fused_recurrent_gated_delta_rule_: .*; another prefill algorithm runs"):
        kernels = {each.kernel for each in working_variants(lambda: forward(on_mps))}
    assert "fused_chunk_gated_delta_rule" in kernels and "fused_recurrent_gated_delta_rule_token" not in kernels


@pytest.mark.parametrize("entry", REGISTRY.values(), ids=lambda x: x.name)
def test_each_op_passes(on_mps: torch.device, entry: OpEntry[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its small call has a verdict without a problem, which a new process reads, and the results of an untested one."""
    case, tests = Case(entry.name, entry.small), count_tests(monkeypatch)
    first, count = computed(case)[1], len(tests)
    forget()
    second = computed(case)[1]
    assert len(tests) == count > 0 and stored() and not any(stored().values())
    for name, x in second.items():
        assert_same_bits(name, first[name], x)


# ---- calls of every kind ---------------------------------------------------------------------------------------------


def test_a_recording_tests_nothing(on_mps: torch.device) -> None:
    with torch_gdn.recording() as recorded:
        computed(NORM)
    assert len(recorded.launches) == 1 and stored() == {}
    assert warned(NORM) == "" and list(stored().values()) == [""]


def test_a_trace_has_each_launch_once(on_mps: torch.device) -> None:
    seen: list[str] = []
    with _C.Tracing(lambda launch: seen.append(launch["kernel"]), lambda launch: None, True):
        computed(NORM)
    assert seen == ["rms_norm_gated"] and list(stored().values()) == [""]


def test_fake_tensors_are_not_tested(on_mps: torch.device) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 64, device=on_mps)
        assert torch_gdn.l2norm(x).shape == x.shape
    assert stored() == {}


def test_a_compiled_call_is_tested(on_mps: torch.device, plant: Plant) -> None:
    plant("layers/rms_norm_gated", compiles=True)
    call = NORM.entry.call(NORM.point)
    tensors = [call[name] for name in ("x", "g", "weight")]
    compiled = torch.compile(lambda *x: torch_gdn.rms_norm_gated(*x) + 1, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="rms_norm_gated: "):
        result = compiled(*(x.to(on_mps) for x in tensors))
    assert torch.equal(result.cpu(), torch_gdn.rms_norm_gated(*tensors) + 1)


class Zeros(TorchDispatchMode):
    """A mode that returns something other than what operators compute, like a mode that counts them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return torch.zeros_like(result) if func.namespace == "gdn" else result


def test_a_dispatch_mode_does_not_reach_the_test(on_mps: torch.device) -> None:
    call = to_device(NORM.entry.call(NORM.point), on_mps)
    with Zeros():
        assert not NORM.entry.overload(**call).any()
    assert list(stored().values()) == [""]


def test_inference_mode_is_tested(on_mps: torch.device) -> None:
    with torch.inference_mode():
        assert warned(UPDATE) == ""
    assert list(stored().values()) == [""]


def test_threads_wait_for_one_test(on_mps: torch.device, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("layers/rms_norm_gated", compiles=True)
    tests, threads = count_tests(monkeypatch), 4
    barrier, expected = Barrier(threads), computed(NORM, "cpu")[1]

    def call() -> dict[str, Tensor]:
        barrier.wait()
        return computed(NORM)[1]

    with pytest.warns(UserWarning), ThreadPoolExecutor(threads) as pool:
        result = [each.result() for each in [pool.submit(call) for _ in range(threads)]]
    assert tests == [NORM.op]
    for each in result:
        assert_same_bits("result", each["y"], expected["y"])


# ---- what is copied --------------------------------------------------------------------------------------------------


def test_an_op_that_writes_is_compared_with_the_same_start(on_mps: torch.device) -> None:
    """A copy of the state that is made after the call would be one token ahead."""
    for case in (DECODE_, UPDATE):
        first, second = computed(case)[1], computed(case)[1]
        for name, x in second.items():  # the test moved no state
            assert_same_bits(name, first[name], x)


@pytest.mark.parametrize("shader", KINDS)
def test_each_kind_of_op_is_compared(on_mps: torch.device, plant: Plant, shader: str) -> None:
    plant(shader, compiles=True)
    op = KINDS[shader]
    with pytest.warns(UserWarning, match=rf"{op}: \w+: error .*; the CPU's kernel runs instead"):
        assert matches_the_cpu(Case(op, REGISTRY[op].small))


def test_the_copies_keep_what_was_there(on_mps: torch.device) -> None:
    made = shadow.Copies(DECODE_.entry.overload, to_device(DECODE_.entry.call(DECODE_.point), on_mps))
    before = made.written["state_pool"].clone()
    made.run()
    assert torch.equal(made.written["state_pool"], before)
    assert not torch.equal(made.part("state_pool", made.call), before)


def decode_in(pool: Tensor, indices: list[int], null_index: int, device: torch.device) -> tuple[Call, Tensor]:
    call = REGISTRY[DECODE_.op].call(replace(RULE, tokens=1))
    tensors = {name: call[name].expand(len(indices), *call[name].shape[1:]) for name in ("q", "k", "v", "g", "beta")}
    call = tensors | {"state_pool": pool, "state_indices": torch.tensor(indices), "null_index": null_index}
    on_device = to_device(call, device)
    return on_device, torch.ops.gdn.fused_recurrent_gated_delta_rule_(**on_device)


@pytest.mark.parametrize("null_index", [-1, 0])
def test_only_the_slots_of_a_call_are_copied(
    on_mps: torch.device, plant: Plant, monkeypatch: pytest.MonkeyPatch, null_index: int
) -> None:
    """The fault makes the results of the CPU's kernel come back to the slots of the call."""
    plant("gdn/fused_recurrent_gated_delta_rule_token", compiles=True)
    pool, sizes = torch.randn(50, 2, 32, 32), []
    copy = shadow.Copies.__init__

    def noted(self: Any, overload: Any, call: Call) -> None:
        copy(self, overload, call)
        sizes.append(len(self.rows["state_pool"]))

    monkeypatch.setattr(shadow.Copies, "__init__", noted)
    indices = [41, null_index, 7]
    expected, o = decode_in(pool.clone(), indices, null_index, torch.device("cpu"))
    with pytest.warns(UserWarning, match="o: error"):
        result, own = decode_in(pool, indices, null_index, on_mps)
    assert sizes == [2 + (null_index == 0)]
    assert_same_bits("o", own.cpu(), o)
    assert_same_bits("state_pool", result["state_pool"].cpu(), expected["state_pool"])
    changed = (result["state_pool"].cpu() != pool).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [7, 41]


def test_only_the_pages_of_a_call_are_copied(on_mps: torch.device) -> None:
    call = {
        "key_cache": torch.randn(40, 16, 1, 32),
        "block_table": torch.tensor([[7, 30, 999], [30, 2, 5]]),
        "max_seq_len": 20,
    }
    on_device = to_device(call, on_mps)
    assert shadow.copied_bytes(on_device) == pytest.approx(5 * 16 * 32 * 4 + 6 * 8)
    made = shadow.Copies(torch.ops.gdn.paged_attention_.default, on_device)
    assert made.rows["key_cache"].tolist() == [2, 7, 30]
    assert torch.equal(made.part("key_cache", made.call), call["key_cache"][[2, 7, 30]])
    slots = {"key_cache": call["key_cache"], "slot_mapping": torch.tensor([7 * 16 + 3, -1, 2 * 16])}
    made = shadow.Copies(torch.ops.gdn.reshape_and_cache_.default, to_device(slots, on_mps))
    assert made.rows["key_cache"].tolist() == [2, 7] and len(made.written["key_cache"]) == 2


def test_a_large_call_leaves_the_test_to_a_smaller_one(on_mps: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "MOST_BYTES", 1 << 12)
    torch_gdn.l2norm(torch.randn(64, 64, device=on_mps))
    assert stored() == {}
    torch_gdn.l2norm(torch.randn(2, 64, device=on_mps))
    assert list(stored().values()) == [""]


def test_a_process_of_large_calls_stops_asking(on_mps: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "MOST_BYTES", 0)
    monkeypatch.setattr(self_test, "MOST_UNTESTED", 2)
    asked: list[str] = []
    trusted = self_test.trusted
    monkeypatch.setattr(self_test, "trusted", lambda op, *others: [asked.append(op), trusted(op, *others)][1])
    for _ in range(5):
        computed(NORM)
    assert len(asked) == 3 and stored() == {}


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_wrong_index_is_no_fault_of_a_kernel(on_mps: torch.device) -> None:
    weight = torch.zeros(4, 4, dtype=torch.int32, device=on_mps)
    scales = torch.ones(4, 1, device=on_mps)
    torch_gdn.dequantize(weight, scales, scales, 4, indices=torch.tensor([9], device=on_mps))
    with pytest.raises(RuntimeError, match="indices"):
        torch.mps.synchronize()
    assert stored() == {}


def test_no_memory_is_no_fault_of_a_kernel(on_mps: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> Any:
        raise RuntimeError("MPS backend out of memory")

    monkeypatch.setattr(self_test, "trusted", no_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        computed(NORM)
    assert stored() == {} and not self_test.replaced


def test_inputs_that_are_not_finite_leave_the_test_to_another_call(on_mps: torch.device) -> None:
    x = torch.randn(2, 64)
    x[0, 3] = torch.nan
    result = torch_gdn.l2norm(x.to(on_mps))
    assert result[0].isnan().all() and result[1].isfinite().all()
    assert stored() == {}
    torch_gdn.l2norm(x[1:].to(on_mps))
    assert list(stored().values()) == [""]


def changed(x: Tensor, at: Any, value: Any) -> Tensor:
    other = x.clone()
    other[at] = value
    return other


HEADS = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0))
CODES = torch.arange(1000, dtype=torch.int32)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (HEADS.bfloat16(), ""),
        (changed(HEADS, (slice(None), 5), HEADS[:, 6]), "error"),  # one head of 64
        (changed(HEADS, (3, 4, 5), 2.0), "error"),  # one element
        (HEADS * 1.1, "error"),
        (torch.zeros_like(HEADS), "error 1, "),
        (changed(HEADS, (0, 0, 0), torch.nan), "NaN"),
        (changed(HEADS, (0, 0, 0), torch.inf), "NaN"),
    ],
)
def test_what_is_wrong(result: Tensor, problem: str) -> None:
    text = shadow.problem_of("o", result, HEADS.to(result.dtype))
    assert text is not None and (text.startswith("o: ") and problem in text if problem else text == "")


def test_integers_may_differ_here_and_there() -> None:
    assert shadow.problem_of("codes", changed(CODES, slice(100), 0), CODES) == ""
    assert shadow.problem_of("codes", changed(CODES, slice(500), -1), CODES) == "codes: 50% of the integers differ"
    before = torch.zeros_like(CODES)  # of which the call writes ten
    expected = changed(before, slice(10), 7)
    assert shadow.problem_of("codes", before, expected, before) == "codes: 100% of the integers differ"


def test_what_a_call_does_not_write_is_not_compared() -> None:
    before = torch.full((4, 32), torch.nan)
    expected = changed(before, 0, HEADS[0, 0])
    assert shadow.problem_of("out", expected, expected, before) == ""
    assert str(shadow.problem_of("out", before, expected, before)).startswith("out: NaN or infinite where the CPU's")
    assert shadow.problem_of("out", before, before) is None  # what the CPU's kernel wrote is NaN


def test_infinities_that_agree_are_right() -> None:
    right = changed(HEADS, 0, -torch.inf)
    assert shadow.problem_of("m", right, right) == ""
    assert str(shadow.problem_of("m", changed(right, 1, 0.0), right)).startswith("m: error")
