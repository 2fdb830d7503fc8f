"""Tests the parts of the SGLang plugin that need no SGLang: the delta rule, sampling by seeds, copies of states between
slots, and refusals of quantised files.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference
from torch_gdn_engines import sglang
from torch_gdn_engines.sglang import kernels, sampling, tracking


def test_tokens_are_as_frequent_as_likely_over_seeds_and_over_positions(device: torch.device) -> None:
    p, n = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.025, 0.005]), 20_000
    same, others = torch.full((n,), 2**40), torch.arange(n)
    logprobs = p.log().expand(n, -1).to(device)
    for seeds, positions in ((others, same), (same, others)):
        tokens = sampling.sample_by_seeds(logprobs, seeds.to(device), positions.to(device))[:, 0]
        counts = tokens.cpu().bincount(minlength=len(p))
        deviations = (counts - n * p) / (n * p * (1 - p)).sqrt()
        assert deviations.abs().max() < 4, deviations


def test_each_bit_of_a_seed_and_of_a_position_counts(device: torch.device) -> None:
    for given in (lambda x: (x, torch.ones(1)), lambda x: (torch.ones(1, dtype=torch.long), x % 2**31)):
        seeds, positions = (x.to(device) for x in given(2 ** torch.arange(62)))
        tokens = sampling.sample_by_seeds(torch.zeros(1, 100_000, device=device), seeds, positions)
        assert len(tokens.unique()) == max(len(seeds.unique()), len(positions.unique()))


def test_a_seed_gives_the_tokens_of_earlier_versions(device: torch.device) -> None:
    seeds, positions = torch.tensor([0, 1, 2**40, 2**61]).to(device), torch.tensor([0, 7, 2**20, 2**30]).to(device)
    tokens = sampling.sample_by_seeds(torch.zeros(4, 100_000, device=device), seeds, positions)
    assert tokens[:, 0].tolist() == [42359, 36756, 67420, 52633]


def test_filtered_tokens_are_those_of_the_whole_vocabulary(device: torch.device) -> None:
    """A seed chooses a token by its id, whatever its rank. Here the filter keeps all tokens."""

    def by_rank(probs: torch.Tensor, *others: object, **options: object) -> tuple[torch.Tensor, ...]:
        weights, ids = probs.sort(dim=-1, descending=True)
        return ids[:, 0], weights, ids, weights[:, 0]

    probs = torch.rand(50, 20).softmax(-1).to(device)
    seeds, positions = torch.arange(50).to(device), torch.arange(50).to(device)
    filtered = sampling.sample_filtered(by_rank, probs, None, None, None, False, seeds, positions)
    assert filtered.tolist() == sampling.sample_by_seeds(probs.log(), seeds, positions)[:, 0].tolist()


def test_states_are_copied_where_the_mask_says_so(device: torch.device) -> None:
    """A request with a freed slot, -1, is skipped, and so is everything after the batch. The pools are views."""
    pools = [torch.randn(3, 8, 5, 3), torch.randn(3, 8, 4, 6)]
    wanted = [pool.clone() for pool in pools]
    for pool in wanted:
        pool[:, 5], pool[:, 7] = pool[:, 1].clone(), pool[:, 2].clone()
    result = [torch.zeros(4, 9, *pool.shape[2:], device=device)[1:, 1:].copy_(pool) for pool in pools]
    source, destination = (torch.tensor(x, device=device) for x in ([1, 3, -1, 2, 6, 0], [5, 4, 6, 7, -1, 3]))
    mask = torch.tensor([True, False, True, True, True, True], device=device)
    tracking.track_all_layers(*result, source, mask, destination, batch_size=5)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(result, wanted, strict=True))
    one_slot, slot = torch.zeros(1, 5, 3, device=device), torch.zeros(1, dtype=torch.long, device=device)
    tracking.track_one_layer(one_slot, one_slot, slot, slot > 0, slot, batch_size=1)


H, HV, K, V, SLOTS = 2, 4, 32, 16, 6


def inputs_of(tokens: int) -> list[torch.Tensor]:
    keys, values = (1, tokens, H, K), (1, tokens, HV, V)
    return [*torch.randn(2, *keys), torch.randn(values), -torch.rand(1, tokens, HV), torch.rand(1, tokens, HV)]


@pytest.mark.parametrize(
    "slots", [[2, 0], [0, -1], [-1, 0, 5], [-1, -1], [5, -1, 3, -1]], ids=lambda x: ",".join(map(str, x))
)
@pytest.mark.parametrize("tracks", [False, True])
def test_a_prompt_changes_its_own_slot_and_padding_changes_nothing(
    slots: list[int], tracks: bool, device: torch.device
) -> None:
    lengths = [70, 129, 5, 64][: len(slots)]
    chunks = [1, 2, 0, 1][: len(slots)]  # after which a state is kept
    parts = [inputs_of(n) for n in lengths]
    pool, tracked = torch.randn(SLOTS, HV, V, K), torch.randn(len(slots), HV, V, K)
    found_pool, found_tracked = pool.clone().to(device), tracked.clone().to(device)
    kept_by: dict[str, Any] = {"track_chunk_idx": torch.tensor(chunks).to(device), "track_state": found_tracked}
    o, _, _ = kernels.DeltaRule().extend(
        *(torch.cat(part, 1).to(device) for part in zip(*parts, strict=True)),
        ssm_states=found_pool,
        cache_indices=torch.tensor(slots, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32),
        **(kept_by if tracks and kernels.DeltaRule.supports_track_state_snapshot else {}),
    )
    exact_pool = pool.double()
    for i, (slot, part, result) in enumerate(zip(slots, parts, o.split(lengths, 1), strict=True)):
        if slot < 0:
            assert result.count_nonzero() == 0, "the output of padding"
            assert_same_bits("the kept state of padding", found_tracked[i], tracked[i])
            continue

        def run(tokens: int, part: list[torch.Tensor] = part, slot: int = slot) -> Any:
            q, k, v, g, beta = (x[:, :tokens].double() for x in part)
            options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "state_v_first": True}
            return reference.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta=beta, initial_state=pool[slot : slot + 1].double(), **options
            )

        exact, state = run(lengths[i])
        assert_close("o", result.cpu(), exact, 1e-4)
        exact_pool[slot] = state[0]
        if tracks:
            kept = run(64 * chunks[i])[1] if chunks[i] else pool[slot : slot + 1].double()
            assert_close("the kept state", found_tracked[i : i + 1].cpu(), kept, 1e-4, head_dim=1)
    used = [slot for slot in slots if slot >= 0]
    others = [slot for slot in range(SLOTS) if slot not in used]
    assert_close("states", found_pool[used].cpu(), exact_pool[used], 1e-4, head_dim=1)
    assert_same_bits("states of other requests", found_pool[others], pool[others])


@pytest.mark.parametrize("slots", [[2, -1, 5], [-1, 0]], ids=lambda x: ",".join(map(str, x)))
def test_a_token_changes_its_own_slot_and_padding_changes_nothing(slots: list[int], device: torch.device) -> None:
    n = len(slots)
    q, k, v, a, b = (x[0][:, None].transpose(0, 1) for x in inputs_of(n))
    pool, columns = torch.randn(SLOTS, HV, V, K), torch.randn(SLOTS, 8, 3)
    found_pool, found_columns = pool.clone().to(device), columns.clone().to(device)
    gates = {"A_log": torch.randn(HV).to(device), "dt_bias": torch.randn(HV).to(device)}
    indices = torch.tensor(slots, dtype=torch.int32, device=device)
    where = {"ssm_states": found_pool, "cache_indices": indices, "query_start_loc": indices}
    o = kernels.DeltaRule().decode(*(x.to(device) for x in (q, k, v, a[0], b[0])), **gates, **where)
    y = kernels.convolve_tokens(
        torch.randn(n, 8).to(device), found_columns, torch.randn(8, 4).to(device), conv_state_indices=indices
    )
    for i, slot in enumerate(slots):
        assert (o[0, i].count_nonzero() == 0) == (y[i].count_nonzero() == 0) == (slot < 0)
    others = [slot for slot in range(SLOTS) if slot not in slots]
    used = [slot for slot in slots if slot >= 0]
    for result, before in ((found_pool, pool), (found_columns, columns)):
        assert_same_bits("other slots", result[others], before[others])
        assert all((result[slot].cpu() != before[slot]).any() for slot in used)


def test_what_no_kernel_can_do_is_refused() -> None:
    x, states, slots = torch.zeros(2, 4), torch.zeros(2, 4, 3), torch.arange(2, dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    known = {"pad_slot_id": -1, "validate_data": False}
    weight = torch.zeros(4, 4)
    kernels.convolve_tokens(x, states, weight, conv_state_indices=slots, intermediate_conv_window=None, **known)
    kernels.convolve_prompts(x.t(), weight, None, states, starts, cache_indices=slots, block_table=None, **known)
    rule, q, gates = kernels.DeltaRule(), torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1)
    pools = {"ssm_states": torch.zeros(2, 1, 4, 4), "cache_indices": slots, "query_start_loc": starts}
    decode_args = {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1)} | pools
    norm, unknown = SimpleNamespace(weight=torch.ones(4), eps=1e-6, activation="silu"), ".* does not know this argument"
    tokens, prompts = (x, states, weight), (x.t(), weight, None, states, starts)
    for message, refused in (
        (f"causal_conv1d_update: block_table: {unknown}", partial(kernels.convolve_tokens, *tokens, block_table=slots)),
        ("causal_conv1d_update: expected", partial(kernels.convolve_tokens, *tokens, cache_seqlens=slots)),
        ("causal_conv1d_update: expected", partial(kernels.convolve_tokens, x[None], *tokens[1:])),
        (f"causal_conv1d_fn: block_table: {unknown}", partial(kernels.convolve_prompts, *prompts, block_table=slots)),
        (f"Kernel.decode: other: {unknown}", partial(rule.decode, q, q, q, gates[0], gates[0], **decode_args, other=1)),
        (f"Kernel.extend: other: {unknown}", partial(rule.extend, q, q, q, gates, gates, **pools, other=1)),
        ("multi-item", partial(rule.extend, q, q, q, gates, gates, **pools, inplace_update=False)),
        ("FusedRMSNormGated", partial(kernels.gated_norm, norm, x, x, x)),
        ("FusedRMSNormGated", partial(kernels.gated_norm, norm, x, x, prenorm=True)),
        ("fused_sigmoid_mul", partial(kernels.sigmoid_mul, x, x, quant=True)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            refused()


@pytest.mark.parametrize("values", [1, 3])  # heads of a key head
def test_columns_are_split(values: int) -> None:
    q, k, v, z = (torch.randn(5, 2, columns) for columns in (4, 4, 6 * values, 6 * values))
    b, a = torch.randn(2, 5, 2, values)
    for split, joined in (
        (kernels.split_by_key_head, lambda *parts: torch.cat(parts, -1).flatten(1)),
        (kernels.split_contiguous, lambda *parts: torch.cat([x.flatten(1) for x in parts], -1)),
    ):
        result = split(joined(q, k, v, z), joined(b, a), 2, 2 * values, 4, 6)
        wanted = [torch.cat([x.flatten(1) for x in (q, k, v)], -1), z.reshape(5, -1, 6), b.flatten(1), a.flatten(1)]
        assert all(torch.equal(x, y) for x, y in zip(result, wanted, strict=True))


@pytest.mark.parametrize("activation", [True, False, "silu", None])
def test_a_convolution_without_slots_takes_a_slot_for_each_sequence(activation: bool | str | None) -> None:
    """The pool is wider than the convolution."""
    x, weight, pool = torch.randn(3, 8), torch.randn(8, 4), torch.randn(3, 8, 5)
    exact = (torch.cat([pool[..., :3], x[..., None]], -1).double() * weight).sum(-1)
    exact = torch.nn.functional.silu(exact) if activation else exact
    y = kernels.convolve_tokens(x, pool.clone(), weight, activation=activation)
    starts = torch.arange(4, dtype=torch.int32)
    from_prompts = kernels.convolve_prompts(x.t(), weight, None, pool.clone(), starts, activation=activation).t()
    assert_close("y", y, exact, 1e-6, head_dim=0)
    assert_close("y of prompts", from_prompts, exact, 1e-6, head_dim=0)


def theirs(*given: Any, **options: Any) -> Any:
    return options


def test_a_router_of_another_kind_is_sglangs() -> None:
    logits = torch.randn(2, 8)
    assert isinstance(kernels.router(theirs, logits, logits, 2, True, another=None), tuple)
    for name, value in (("another", 1), ("correction_bias", torch.zeros(8)), ("scoring_func", "sigmoid")):
        assert kernels.router(theirs, logits, logits, 2, True, **{name: value})[name] is value


def test_a_norm_of_another_kind_is_sglangs() -> None:
    (x, z), weight = torch.randn(2, 3, 8), torch.randn(8)
    plain = {"weight": weight, "eps": 1e-6, "activation": "silu", "group_size": None, "norm_before_gate": True}
    result = kernels.gated_norm_or_plain(theirs, SimpleNamespace(**plain), x, z)
    assert_close("norm", result, reference.rms_norm_gated(x.double(), z.double(), weight.double()), 1e-6, head_dim=0)
    assert kernels.gated_norm_or_plain(theirs, SimpleNamespace(**plain), x) == {}
    for name, value in (("group_size", 4), ("norm_before_gate", False)):
        assert kernels.gated_norm_or_plain(theirs, SimpleNamespace(**plain | {name: value}), x, z) == {}


def test_experts_of_another_kind_are_sglangs() -> None:
    x, weights, ids = torch.randn(3, 32), torch.rand(3, 2), torch.tensor([[0, 3], [1, 0], [2, 3]], dtype=torch.int32)
    layer = SimpleNamespace(w13_weight=torch.randn(4, 64, 32), w2_weight=torch.randn(4, 32, 32))
    plain = {
        "activation": "silu",
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "apply_router_weight_on_input": False,
    }
    hidden, _ = reference.moe_gate_up(x.double(), layer.w13_weight.double(), ids)
    exact = reference.moe_down(hidden, layer.w2_weight.double(), weights.double(), ids)
    result = kernels.experts(theirs, layer, x, (weights, ids, None), SimpleNamespace(**plain))
    assert_close("experts", result, exact, 1e-5, head_dim=0)
    others = [("activation", "gelu"), ("gemm1_alpha", 1.0), ("gemm1_clamp_limit", 7.0), (list(plain)[-1], True)]
    for name, value in others:
        assert kernels.experts(theirs, layer, x, (weights, ids, None), SimpleNamespace(**plain | {name: value})) == {}
    layer.w2_weight_bias = torch.zeros(4, 32)
    assert kernels.experts(theirs, layer, x, (weights, ids, None), SimpleNamespace(**plain)) == {}


def test_the_shared_experts_gate() -> None:
    x, weight, shared, output = torch.randn(3, 8), torch.randn(8), torch.randn(3, 6), torch.randn(3, 6)
    exact = output.double() + (x.double() @ weight.double()).sigmoid()[:, None] * shared
    kernels.gate_sigmoid_mul_add(x, weight, shared, output)
    assert_close("output", output, exact, 1e-6, head_dim=0)


class Batch(list[SimpleNamespace]):
    device, sampling_seed = "cpu", None


def test_requests_without_a_seed_get_one_if_another_has_one() -> None:
    batch, some, none = (
        Batch(SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds)
        for seeds in ([None, 0, None], [2**40], [None])
    )
    for each in (batch, some, none):
        each.reqs = each
        sampling.with_seeds(lambda cls, own: own, Batch, each)
    first, second, third = batch.sampling_seed.tolist()
    assert second == 0 and first != third and none.sampling_seed is None
    sampling.merge_seeds(lambda *each: each, none, some)
    assert some.sampling_seed.tolist() == [2**40] and 0 <= none.sampling_seed.item() < 2**31


def test_a_stream_is_recorded_except_on_mps(device: torch.device) -> None:
    seen: list[Any] = []
    sampling.record_stream(lambda *given: seen.append(given), torch.zeros(1, device=device), "stream")
    assert len(seen) == (device.type != "mps")


@pytest.mark.parametrize("mode", ["auto", "mps", "off"])
@pytest.mark.parametrize(("mlx", "cpu"), [(False, "0"), (True, "0"), (False, "1")])
def test_sglangs_other_runners_keep_their_functions(
    mode: str, mlx: bool, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[str] = []
    hooks = SimpleNamespace(require_checked_version=lambda: None, register=lambda: registered.append(mode))
    environ = SimpleNamespace(envs=SimpleNamespace(SGLANG_USE_MLX=SimpleNamespace(get=lambda: mlx)))
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", environ)  # type: ignore[arg-type]
    monkeypatch.setattr(sglang, "hooks", hooks, raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", cpu)
    monkeypatch.setenv("TORCH_GDN_SGLANG", mode)
    sglang.register()
    assert registered == ([mode] if mode == "mps" or (mode == "auto" and not mlx and cpu == "0") else [])
    monkeypatch.setenv("TORCH_GDN_SGLANG", "cpu")
    with pytest.raises(SystemExit, match=r"^TORCH_GDN_SGLANG=cpu: .*which has no build for the CPU on PyPI; set auto"):
        sglang.register()
