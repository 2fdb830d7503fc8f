"""chunk_kda's fused kernel on Metal, against the float64 recurrence: both sizes of chunks, gates, pools, views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run, on_a_mac, ready
from tests.helpers.errors import RECURRENT_OUTPUT, assert_close, assert_same_bits
from tests.helpers.kda import F32, FUSED, KERNEL, Inputs, exact_kda, inputs_and_options, kda_inputs
from torch_gdn.prefill import prefill_algorithm
from torch_gdn.testing.inputs import to_device

each_chunk_size = pytest.mark.parametrize("chunk_size", [8, 16])
only_simulated = pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")


def fused(inputs: dict[str, Any], chunk_size: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """o and the final state, on mps; the kernel must run."""
    mps = ready("mps")
    with kernels_run(mps, FUSED), prefill_algorithm("fused_chunk", chunk_size):
        given = {"output_final_state": True} | to_device(options, mps)
        o, state, _ = torch.ops.gdn.chunk_kda(**to_device(inputs, mps), **given)
    return o, state


def assert_exact(inputs: Inputs, chunk_size: int = 0, **options: Any) -> None:
    o, state = fused(inputs, chunk_size, **options)
    exact_o, exact_state = exact_kda(inputs, **options)
    assert o.dtype == inputs["v"].dtype and state.dtype == torch.float32
    assert_close("o", o.cpu(), exact_o, max(F32, RECURRENT_OUTPUT.get(o.dtype, 0)))
    assert_close("final_state", state.cpu(), exact_state, F32, head_dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_chunk_size
def test_dtypes(chunk_size: int, dtype: torch.dtype) -> None:
    mps = ready("mps")
    names = {torch.float32: "float", torch.bfloat16: "bfloat", torch.float16: "half"}
    with kernels_run(mps, f"{FUSED}_{names[dtype]}_64_{chunk_size}_4"):
        assert_exact(kda_inputs(37, 64, 48, B=2, H=2, HV=4, dtype=dtype), chunk_size)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (33, 65), (60, 100), (96, 33), (128, 32), (255, 9)])
def test_sizes(K: int, V: int) -> None:
    assert_exact(kda_inputs(19, K, V))


@pytest.mark.parametrize("T", [1, 8, 9, 16, 63, 65])
@each_chunk_size
def test_lengths(chunk_size: int, T: int) -> None:
    assert_exact(kda_inputs(T, 32, 32), chunk_size)


@each_chunk_size
def test_channels_that_forget_beside_others_that_do_not(chunk_size: int) -> None:
    inputs = kda_inputs(65)
    inputs["g"] = -20 * torch.rand_like(inputs["g"])
    inputs["g"][..., ::2] = -1e-3
    assert_exact(inputs, chunk_size)


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
@each_chunk_size
def test_resets(chunk_size: int, reset: float) -> None:
    """Resets a whole head within 8 tokens, some channels at their first and last token, and a head twice."""
    inputs = kda_inputs(40, 32, 32)
    g = inputs["g"]
    g[:, 11, 0] = g[:, 16, :, ::3] = g[:, 31, :, 1::3] = g[:, 33:35, 1] = reset
    assert_exact(inputs, chunk_size)


@each_chunk_size
def test_repeated_keys(chunk_size: int) -> None:
    inputs = kda_inputs(65)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"], inputs["g"] = 1.9 * (1 - 0.1 * inputs["beta"]), 0.01 * inputs["g"]
    assert_exact(inputs, chunk_size)


def test_a_state_that_hardly_decays() -> None:
    """250 blocks of 8 tokens: a decay rounded alike in each of them would be off by 2e-6 at the end."""
    inputs = kda_inputs(2000, 32, 8, HV=1)
    inputs["g"], inputs["beta"] = torch.full_like(inputs["g"], -3e-5), 1e-3 * inputs["beta"]
    assert_exact(inputs)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gate_is_in_the_kernel(dtype: torch.dtype, has_bias: bool, lower_bound: float | None) -> None:
    """Raw gates from -30 to 30, parameters in any shape, and one dispatch."""
    inputs = kda_inputs(20, 36, 32)
    inputs["g"] = (30 * (2 * torch.rand_like(inputs["g"]) - 1)).to(dtype)
    options = {"A_log": torch.tensor([-1.0, 0.5]), "use_gate_in_kernel": True, "lower_bound": lower_bound}
    if has_bias:
        options["dt_bias"] = torch.randn(2, 36).to(dtype)
    assert_exact(inputs, **options)
    if not on_a_mac():
        import mps_simulator

        there, options = to_device(inputs, ready("mps")), to_device(options, ready("mps"))
        with mps_simulator.profile() as profile:
            torch.ops.gdn.chunk_kda(**there, **options)
        assert [each.dispatches for each in profile.kernels.values()] == [1] and not profile.fallbacks


def test_a_bounded_gate_needs_no_A_log() -> None:
    assert_exact(kda_inputs(17, 32, 32), use_gate_in_kernel=True, lower_bound=-5.0)


@each_chunk_size
def test_options(chunk_size: int) -> None:
    inputs, options = inputs_and_options(20)
    assert_exact(inputs, chunk_size, **options)


def test_tiled_heads() -> None:
    inputs = kda_inputs(20, 32, 16, H=2, HV=4)
    o, state = fused(inputs, head_grouping="tiled")
    repeated = {name: inputs[name].repeat(1, 1, 2, 1) for name in "qk"}
    exact_o, exact_state = exact_kda(inputs | repeated)
    assert_close("o", o.cpu(), exact_o, F32)
    assert_close("final_state", state.cpu(), exact_state, F32, head_dim=1)


def test_rows_of_zeros_under_the_norm() -> None:
    inputs = kda_inputs(20, 32, 16)
    inputs["q"][:, 3] = inputs["k"][:, 5] = 0
    inputs["k"] *= 1e-3
    assert_exact(inputs, use_qk_l2norm_in_kernel=True)


@each_chunk_size
def test_packed_and_empty_sequences(chunk_size: int) -> None:
    cu_seqlens = torch.tensor([0, 5, 5, 21, 38])
    assert_exact(kda_inputs(38, 32, 32, N=4) | {"cu_seqlens": cu_seqlens}, chunk_size)


def test_nan_stays_in_its_sequence_and_head() -> None:
    for name in ("q", "k", "v", "g", "beta"):
        inputs = kda_inputs(40, 32, 8, B=2, HV=2, H=2)
        clean, _ = fused(inputs, 8)
        inputs[name][0, 17, 1] = torch.nan
        found, _ = fused(inputs, 8)
        assert found[0, 17, 1].isnan().any(), name
        assert_same_bits(name, found[0, :16], clean[0, :16])
        assert_same_bits(name, found[0, :, 0], clean[0, :, 0])
        assert_same_bits(name, found[1], clean[1])


def in_place(inputs: dict[str, Any], pool: Tensor, **options: Any) -> Tensor:
    with kernels_run(pool.device, FUSED), prefill_algorithm("fused_chunk"):
        o: Tensor = torch_gdn.chunk_kda_(**inputs, state_pool=pool, **options)
    return o


def without_state(inputs: Inputs) -> Inputs:
    return {name: x for name, x in inputs.items() if name != "initial_state"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_slots(dtype: torch.dtype) -> None:
    """Sequence 0 continues in slot 5, 1 has no slot, 2 starts from zeros in slot 1."""
    mps = ready("mps")
    inputs = without_state(kda_inputs(21, 32, 16, B=3))
    pool = torch.randn(8, 2, 32, 16).to(dtype).to(mps)
    before, states = pool.clone(), pool[[5, 0, 1]].float()
    states[2] = 0
    expected, final = fused(inputs | {"initial_state": states})
    indices, flags = torch.tensor([5, -1, 1], device=mps), torch.tensor([True, True, False], device=mps)
    o = in_place(to_device(inputs, mps), pool, state_indices=indices, has_initial_state=flags)
    assert (o[1] == 0).all()
    assert_same_bits("o", o[[0, 2]], expected[[0, 2]])
    assert_same_bits("the slots", pool[[5, 1]], final[[0, 2]].to(dtype))
    others = [0, 2, 3, 4, 6, 7]
    assert_same_bits("the other slots", pool[others], before[others])


def test_a_sequence_without_a_slot_is_not_read() -> None:
    """Its tokens may be the padding of a server's batch: NaN."""
    mps = ready("mps")
    inputs = without_state(kda_inputs(20, 32, 16, B=2))
    for x in inputs.values():
        x[1] = torch.nan
    pool = torch.zeros(4, 2, 32, 16, device=mps)
    o = in_place(to_device(inputs, mps), pool, state_indices=torch.tensor([2, -1], device=mps))
    assert (o[1] == 0).all() and not o[0].isnan().any()


def test_checkpoints() -> None:
    """After 64 tokens of sequence 0 and 128 of 1, the states of prefills that end there."""
    mps = ready("mps")
    inputs = to_device(without_state(kda_inputs(130, 32, 16, B=2)), mps)
    pool = torch.randn(8, 2, 32, 16).to(mps)
    before, slots = pool.clone(), torch.tensor([3, 6], device=mps)
    checkpoints = {"checkpoint_offsets": torch.tensor([64, 128]), "checkpoint_indices": torch.tensor([1, 4])}
    in_place(inputs, pool, state_indices=slots, **to_device(checkpoints, mps))
    for n, (tokens, kept) in enumerate(((64, 1), (128, 4))):
        part, alone = {name: x[n : n + 1, :tokens] for name, x in inputs.items()}, before.clone()
        in_place(part, alone, state_indices=slots[n : n + 1])
        assert_same_bits(f"the checkpoint of {n}", pool[kept], alone[slots[n]])


def test_views_with_any_strides() -> None:
    """q, k, v and g of one projection, heads before tokens; beta backwards in memory; o in a buffer with gaps."""
    mps = ready("mps")
    inputs = without_state(kda_inputs(20, 36, 36, B=2, H=2, HV=2))
    pool = torch.randn(5, 2, 36, 36).to(mps)
    expected_pool = pool.clone()
    expected = in_place(to_device(inputs, mps), expected_pool)
    stacked = torch.stack([inputs[name] for name in "qkvg"]).permute(3, 1, 2, 0, 4).contiguous().to(mps)
    views: dict[str, Any] = {name: stacked.permute(3, 1, 2, 0, 4)[i] for i, name in enumerate("qkvg")}
    views["beta"] = inputs["beta"].permute(2, 1, 0).contiguous().to(mps).permute(2, 1, 0)
    assert not any(x.is_contiguous() for x in views.values())
    pages = torch.randn(5, 2, 36, 40).to(mps)[..., :36].mT
    pages.copy_(pool)
    out = torch.full((2, 20, 4, 36), torch.nan, device=mps)[:, :, 1:3]
    in_place(views, pages, out=out)
    assert_same_bits("o", out, expected)
    assert_same_bits("the pool", pages[:2], expected_pool[:2])


def test_rows_that_are_not_aligned() -> None:
    inputs = kda_inputs(20, 32, 16)
    for name in ("q", "k", "v", "g"):
        x = inputs[name]
        inputs[name] = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    there = to_device(inputs, ready("mps"))
    for name in ("q", "k", "v", "g"):
        padded = torch.zeros(inputs[name].numel() + 1, device="mps")
        there[name] = padded[1:].view(inputs[name].shape).copy_(inputs[name])
    with kernels_run(torch.device("mps"), f"{FUSED}_float_32_16_1"):
        o, _ = fused(there)
    assert_close("o", o.cpu(), exact_kda(inputs)[0], F32)


@only_simulated
@pytest.mark.parametrize(
    ("T", "forced", "kernel"),
    [
        (4, None, KERNEL),
        (5, None, FUSED),
        (40, "recurrent", KERNEL),
        (3, "fused_chunk", FUSED),
    ],
)
def test_which_kernel_runs(T: int, forced: str | None, kernel: str) -> None:
    import mps_simulator

    inputs = to_device(kda_inputs(T, 32, 16), ready("mps"))
    with prefill_algorithm(forced), mps_simulator.profile() as profile:
        torch.ops.gdn.chunk_kda(**inputs)
    assert [name.startswith(f"{kernel}_") for name in profile.kernels] == [True]


@only_simulated
@pytest.mark.parametrize(("tokens", "kernel"), [((7, 0, 5), KERNEL), ((7, 0, 6), FUSED)])
def test_the_mean_length_of_packed_sequences_decides(tokens: tuple[int, ...], kernel: str) -> None:
    import mps_simulator

    cu_seqlens = torch.tensor([0, *tokens]).cumsum(0)
    inputs = to_device(kda_inputs(sum(tokens), 32, 16, N=3) | {"cu_seqlens": cu_seqlens}, ready("mps"))
    with mps_simulator.profile() as profile:
        torch.ops.gdn.chunk_kda(**inputs)
    assert [name.startswith(f"{kernel}_") for name in profile.kernels] == [True]


@only_simulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_byte_comes_and_goes_once_in_whole_lines(dtype: torch.dtype) -> None:
    import mps_simulator

    inputs = kda_inputs(64, 128, 128, dtype=dtype)
    state = inputs["initial_state"].nbytes
    compulsory = sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes + state
    there = to_device(inputs, ready("mps"))
    with mps_simulator.profile(detailed=True) as profile:
        torch.ops.gdn.chunk_kda(**there, output_final_state=True)
    (figures,) = profile.kernels.values()
    moved_bytes = figures.device_bytes_distinct_read + figures.device_bytes_distinct_written
    assert compulsory <= moved_bytes <= 1.05 * compulsory
    assert figures.least_cache_lines >= 0.95 * figures.cache_lines
