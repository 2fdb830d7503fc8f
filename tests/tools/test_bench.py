"""Tests that the benchmark counts right, times only right results, and says who is how fast. No test asserts a time."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import (
    contenders,
    counting,
    gdn,
    ggml,
    host,
    kda,
    models,
    modules,
    overhead,
    plots,
    results,
    timing,
    vllm_kernels,
)
from bench.ceilings import Ceilings
from bench.results import OURS, Row
from bench.shapes import ATTENTIONS, KIMI_LINEAR, QWEN3_NEXT, Layer
from bench.timing import Time, measure, steadiest
from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn.integrations import transformers as integration
from torch_gdn_check.peers import Prepared
from torch_gdn_check.registry.cases import Case
from torch_gdn_check.steps import Skipped

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
SMALL = Layer("small", 2, 4, 16, 16)


def test_operations_of_the_chunked_form_by_hand() -> None:
    # For one token and C = 32, there are 2 products of 32 x 128 per key head, and 3 of 128 x 128 and 2 of 32 x 128 per
    # value head.
    by_hand = 16 * 2 * (2 * 32 * 128) + 32 * (3 * (2 * 128 * 128) + 2 * (2 * 32 * 128))
    assert counting.chunked(QWEN3_NEXT, 1) == by_hand
    assert counting.recurrence(QWEN3_NEXT, 1) == 32 * 7 * 128 * 128


def test_bytes_of_prefill_by_hand() -> None:
    work = counting.prefill(QWEN3_NEXT, 10, torch.bfloat16)
    token_bytes = 2 * (16 * 128 * 2 + 32 * 128 * 2) + 4 * (32 * 2)
    assert work.bytes == 10 * token_bytes + 2 * 32 * 128 * 128 * 4


def test_bytes_of_kda_have_a_decay_for_each_key_channel() -> None:
    token_bytes = 4 * 32 * 128 * 2 + 4 * (32 * 128 + 32)
    assert counting.kda(KIMI_LINEAR, 10, 3, torch.bfloat16).bytes == 3 * (10 * token_bytes + 2 * 32 * 128 * 128 * 4)


def test_bytes_of_decode_are_nearly_all_state() -> None:
    work = counting.decode(QWEN3_NEXT, 8, torch.float32)
    state = 2 * 8 * 32 * 128 * 128 * 4
    assert state < work.bytes < 1.02 * state


def test_attention_reads_its_cache_once() -> None:
    work = counting.attention(ATTENTIONS[0], 100, 2000)
    assert (work.operations, work.bytes) == (4 * 32 * 100 * 128, 2000)


def test_the_floor_is_the_larger_of_the_two() -> None:
    work = counting.Work(operations=10, bytes=20)
    assert work.floor(operations_a_second=1, bytes_a_second=100) == 10
    assert work.floor(operations_a_second=100, bytes_a_second=1) == 20


@pytest.mark.parametrize(("seconds", "expected"), [(5e-3, "aabbabab"), (1e-6, "aabb")], ids=["in turn", "slow: once"])
def test_calls_are_timed_in_turn(seconds: float, expected: str) -> None:
    """The first call of each does not count. A call that takes far longer than its time is timed once."""
    order: list[str] = []

    def slow(name: str) -> None:
        order.append(name)
        time.sleep(2e-3)  # longer than what a round repeats

    times = measure({"a": lambda: slow("a"), "b": lambda: slow("b")}, CPU, seconds, attempts=1)
    assert times["a"].best >= 2e-3 and times["a"].median >= times["a"].best
    assert "".join(order) == expected


STEADY, DISTURBED, WORSE = [1.0, 1.1, 1.19], [1.0, 1.21, 1.3], [1.0, 2.0, 3.0]


def attempts_of(*attempts: dict[str, list[float]]) -> Iterator[dict[str, list[float]]]:
    yield from attempts
    raise AssertionError("repeated once too often")


def test_rounds_that_agree_are_not_repeated() -> None:
    assert steadiest(attempts_of({"a": STEADY, "b": [2.0]})) == {"a": (1.0, 1.1, True), "b": (2.0, 2.0, True)}


@pytest.mark.parametrize("disturbed", ["a", "b"])
def test_all_calls_are_repeated_where_the_rounds_of_one_disagree(disturbed: str) -> None:
    """A ratio needs rounds that were made in turn, so no time of a disturbed attempt is used."""
    first = {"a": [0.5, 0.5], "b": [0.5, 0.5]} | {disturbed: DISTURBED}
    second = {"a": STEADY, "b": [x * 2 for x in STEADY]}
    result = steadiest(attempts_of(first, second))
    assert result == {"a": (1.0, 1.1, True), "b": (2.0, 2.2, True)}


def test_of_disturbed_attempts_the_calmest_is_marked() -> None:
    result = steadiest(iter([{"a": WORSE, "b": STEADY}, {"a": DISTURBED, "b": STEADY}, {"a": STEADY, "b": WORSE}]))
    assert result == {"a": (1.0, 1.21, False), "b": (1.0, 1.1, True)}


@pytest.mark.parametrize(("attempts", "expected"), [(2, (1.0, 1.5, False)), (3, (4.0, 4.0, True))])
def test_measuring_repeats_what_the_clock_says_is_unsteady(
    attempts: int, expected: tuple[float, float, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.chain([2.0, 1.0, 2.0], [1.0, 1.5, 1.5], [4.0, 4.0, 4.0])
    monkeypatch.setattr(timing, "time_of", lambda call, repeats, device: next(clock))
    assert measure({"a": lambda: None}, CPU, 3.0, attempts)["a"] == expected
    assert len(list(clock)) == 3 * (3 - attempts)


def test_tables_have_the_median_and_mark_what_was_unsteady() -> None:
    rows = [Row("gdn", "layer", "float32", 64, contender, 1) for contender in (OURS, "other")]
    rows[0].time(Time(2e-3, 3e-3, False))
    rows[1].time(Time(4e-3, 4.1e-3, True))
    ours, other = (line.split(" | ") for line in results.table(rows, "T").splitlines()[2:])
    assert (ours[4:6], other[4:7]) == (["2 (unsteady)", "3"], ["4", "4.1", "2.00"])
    assert "| 2 (unsteady) |" in results.summary(rows, "T")


def test_a_call_is_told_of_before_each_of_its_rounds() -> None:
    """Everything that a call depends on is set up before each of its rounds."""
    current: list[str] = []
    seen = set()

    def call(name: str) -> None:
        seen.add((name, current[-1]))
        time.sleep(2e-3)

    measure({"a": lambda: call("a"), "b": lambda: call("b")}, CPU, 5e-3, attempts=1, before=current.append)
    assert seen == {("a", "a"), ("b", "b")} and len(current) >= 6


@pytest.mark.parametrize(
    ("op", "part"),
    [
        ("gdn::chunk_gated_delta_rule", "torch_gdn's ops"),
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "matrix products"),
        ("aten::mul", "other ops"),
        ("aten::linalg_vector_norm", "other ops"),
    ],
)
def test_what_time_goes_to(op: str, part: str) -> None:
    assert models.part_of(op) == part


@pytest.mark.sweep(1, seeds=3)
@torch.no_grad()
def test_a_small_model_is_as_exact_enabled_and_each_part_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not compiled, because that would take minutes."""
    monkeypatch.setattr(models, "CONTENDERS", [each for each in models.CONTENDERS if not each.compiled])
    ours, theirs = models.run(models.MODEL, "decode", torch.float32, True, Ceilings(CPU), 1e-3)
    assert (ours.contender, theirs.contender) == (OURS, "transformers") and theirs.error == 0
    assert ours.error is not None and 0 < ours.error < 1e-4  # the same model on other kernels
    assert ours.shares["torch_gdn's ops"] > 0 == theirs.shares["torch_gdn's ops"]
    assert all(abs(sum(row.shares.values()) - 1) < 1e-6 and row.rate > 0 for row in (ours, theirs))
    assert not integration.status().enabled
    assert [line.split(" | ")[3] for line in models.tables([ours, theirs])[0].splitlines()[2:]] == [
        OURS,
        "transformers",
    ]


def test_only_what_is_right_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(case: Case, device: torch.device) -> Prepared:
        """Uses the head grouping of GGUF, which is plausible, but wrong here."""
        on_device = case.to(device)

        def call() -> tuple[Tensor, Tensor]:
            return torch.ops.gdn.chunk_gated_delta_rule(
                *on_device.qkv,
                on_device.g,
                on_device.beta,
                initial_state=on_device.initial_state,
                head_grouping="tiled",
            )[:2]

        return Prepared(call, call)

    def absent(case: Case, device: torch.device) -> Prepared:
        raise Skipped("not installed")

    monkeypatch.setattr(contenders, "PREFILL", {OURS: contenders.torch_gdn_prefill, "wrong": prepare, "absent": absent})
    rows = gdn.prefill(SMALL, 40, torch.float32, Ceilings(CPU), 1e-3, names=(OURS, "wrong", "absent"))
    ours, wrong, missing = rows
    assert ours.seconds is not None and ours.error is not None and ours.error < 1e-5 and ours.floor
    assert wrong.seconds is None and "wrong" in wrong.note and wrong.error is not None and wrong.error > 0.1
    assert missing.seconds is None and "not installed" in missing.note


@pytest.mark.parametrize("name", contenders.PREFILL)
def test_each_contender_gives_the_exact_answer(name: str) -> None:
    for section in (contenders.PREFILL, contenders.DECODE):
        case = gdn.case_of(SMALL, 1 if section is contenders.DECODE else 70, 2, torch.float32)
        try:
            o, state = section[name](case, CPU).output()
        except Skipped as reason:
            pytest.skip(f"{name}: {reason}")
        exact = case.exact()
        for x, right in zip((o, state), exact, strict=True):
            assert (x.double() - right).norm() <= 1e-5 * right.norm()


@pytest.mark.parametrize("prepares", ["KDA_PREFILL", "KDA_DECODE"])
@pytest.mark.parametrize("name", contenders.KDA_PREFILL)
def test_each_contender_of_kda_gives_the_exact_answer(prepares: str, name: str) -> None:
    case = kda.case_of(Layer("small", 2, 2, 16, 16), 1 if prepares == "KDA_DECODE" else 70, 2, torch.float32)
    for x, right in zip(getattr(contenders, prepares)[name](case, CPU).output(), case.exact(), strict=True):
        assert (x.double() - right).norm() <= 1e-5 * right.norm()


def test_heads_of_one_key_head_are_its_value_heads() -> None:
    case = gdn.case_of(SMALL, 9, 1, torch.float32)
    whole = gdn.same_heads(case.exact()[0], case)
    assert (gdn.exact_output(case) - whole).norm() <= 1e-12 * whole.norm()


def test_ggml_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ggml.FOLDER, str(tmp_path))
    with pytest.raises(ImportError, match="no libggml-base and libggml-cpu in"):
        ggml.load()


SERVED = {
    "prefill": (vllm_kernels.PREFILL, vllm_kernels.case_of(Layer("served", 2, 4, 64, 64), 70, 2)),
    "decode": (vllm_kernels.DECODE, vllm_kernels.case_of(Layer("served", 2, 4, 64, 64), 1, 3)),
}


@pytest.mark.parametrize("what", SERVED)
@pytest.mark.parametrize("name", vllm_kernels.PREFILL)
def test_each_side_of_vllms_section_gives_the_exact_answer(what: str, name: str) -> None:
    """Gates are raw, states are in pools, and a row has several sequences. Each call starts from the same states."""
    prepares, case = SERVED[what]
    try:
        output = prepares[name](case, CPU).output
    except Skipped as reason:
        pytest.skip(f"{name}: {reason}")
    (exact_o, exact_state), _ = case.exact(), output()
    o, state = output()
    for x, exact in ((o, exact_o), (state.transpose(-1, -2) if name == OURS else state, exact_state)):
        assert (x.double() - exact).norm() <= 1e-2 * exact.norm()


def test_gates_of_vllms_section_are_those_of_the_projections() -> None:
    case = SERVED["decode"][1]
    a, b = (x.double() for x in case.raw_gates)
    assert (case.g[0].double() + (1 + a.exp()).log()).abs().max() <= 1e-6
    assert (case.beta[0].double() - 1 / (1 + (-b).exp())).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["ours", "vllm"])
def test_each_convolution_of_vllms_section_gives_the_exact_answer(name: str) -> None:
    case = vllm_kernels.Convolution(96, 3)
    try:
        y = getattr(case, name)()()
    except Skipped as reason:
        pytest.skip(f"{name}: {reason}")
    assert (y.double() - case.exact()).norm() <= 5e-3 * case.exact().norm()


@pytest.mark.parametrize("has_products", [True, False], ids=["bfloat16 products", "no bfloat16 products"])
def test_vllm_that_is_not_there_is_named(has_products: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_kernels, "has_bf16_products", lambda: has_products)
    monkeypatch.setattr(vllm_kernels, "ops", vllm_kernels.ops.__wrapped__)
    monkeypatch.setenv(vllm_kernels.FOLDER, str(tmp_path))
    for what in ("decode", "convolution"):
        ours, theirs = vllm_kernels.run(what, 1, Ceilings(CPU), 1e-3, SMALL)
        assert ours.seconds is not None and theirs.seconds is None
        assert theirs.note.startswith("not run: no _C") and str(tmp_path) in theirs.note


def test_the_table_holds_ratios_to_ours() -> None:
    rows = [
        Row("prefill", "layer", "float32", 64, OURS, 1, seconds=2.0),
        Row("prefill", "layer", "float32", 64, "other", 1, seconds=7.0),
        Row("prefill", "layer", "float32", 128, "other", 1, seconds=7.0),  # ours has no time
    ]
    assert results.ratios(rows)[rows[1].key, "other"] == 3.5
    assert results.summary(rows, "T").splitlines()[2:] == ["| layer | float32 | 64 | 2000 |  | 3.5 x |"]
    lines = results.table(rows, "T").splitlines()[2:]
    assert [line.split("|")[7].strip() for line in lines] == ["", "3.50", ""]


def test_every_public_function_of_a_layer_has_its_overhead_measured() -> None:
    names = set().union(*(calls(CPU) for calls in overhead.GROUPS.values()))
    assert {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "l2norm", *modules.MODULES} <= names


@pytest.mark.skipif(on_a_mac(), reason="the do-nothing launcher is built for the simulated device")
def test_a_call_without_its_encoding_launches_nothing() -> None:
    device = ready("mps")
    with profiled() as profile:
        (row,) = host.run("l2norm", Ceilings(CPU), 0.01)
    assert row.seconds is not None and row.seconds > 0 and set(row.others) == {host.NOTHING, host.ADD}
    assert not profile.kernels
    again, _ = torch.ops.gdn.l2norm(torch.ones(2, 4, device=device))
    torch.testing.assert_close(again.cpu(), torch.full((2, 4), 0.5))


@pytest.mark.sweep(1, seeds=3)
def test_the_command_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    sections = ["decode", "kda", "modules", "aura", "overhead", "vllm"]
    command = [sys.executable, "-m", "bench", "--quick", "--only", *sections, "--json", str(tmp_path / "bench.json")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    assert "Host overhead" in finished.stdout
    content = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    ours = [row for row in content["rows"] if row["contender"] == OURS]
    assert {row["section"] for row in ours} == set(sections)
    assert all(row["seconds"] > 0 for row in ours)
    assert content["system"]["ceilings"]["products float32"] > 0


def test_the_chart_says_which_back_end_of_mlx_it_shows(tmp_path: Path) -> None:
    cases = [(size, contender) for size in (64, 128) for contender in (OURS, "MLX")]
    rows = [Row("prefill", "layer", "float32", *case, threads=1, seconds=1.0, floor=0.5) for case in cases]
    plots.prefill_times(rows, tmp_path / "prefill.svg")
    assert "<!-- MLX, CPU back end -->" in (tmp_path / "prefill.svg").read_text()


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.skipif(on_a_mac(), reason="a Mac's own GPU does not count bytes")
def test_the_metal_section_counts_each_prefill_algorithm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--quick", "--only", "metal", "--json", str(tmp_path / "bench.json")]
    subprocess.run([*command, "--plots", str(tmp_path)], cwd=ROOT, capture_output=True, check=True, timeout=600)
    rows = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["rows"]
    counts = {row["case"]: row["counts"] for row in rows}
    compulsory = {row["case"]: row["bytes"] for row in rows}
    # chunked has several kernels, with w, u and h in device memory between them. fused_chunk has one kernel.
    assert counts["prefill, chunked"]["launches"] > counts["prefill, fused_chunk"]["launches"] == 1
    assert counts["prefill, chunked"]["distinct bytes"] > 1.5 * counts["prefill, fused_chunk"]["distinct bytes"]
    assert counts["prefill, recurrent"]["matrix products"] == 0 < counts["prefill, fused_chunk"]["matrix products"]
    kda_case = "kda-prefill, fused_chunk"  # gates are computed in the kernel, so no decays in memory
    assert counts[kda_case]["distinct bytes"] <= 1.01 * compulsory[kda_case]
    assert all(row["counts"]["distinct bytes"] >= 0.99 * row["bytes"] for row in rows)
    assert (tmp_path / "metal_bytes.png").stat().st_size > 10_000
