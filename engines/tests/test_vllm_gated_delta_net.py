"""Compares a layer on a batch of vLLM with the float64 references, each sequence by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn_engines.vllm import gated_delta_net

H, HV, K, V, W, DRAFTS, SLOTS = 2, 4, 32, 48, 4, 3, 9
D = 2 * H * K + HV * V


def layer_on(device: torch.device) -> gated_delta_net.LayerState:
    """Pools as vLLM lays them out: a page of each slot holds its columns and its state, and something more."""
    columns, page = W - 1 + DRAFTS, (W - 1 + DRAFTS) * D + HV * V * K + 40
    pages = torch.randn(SLOTS, page).to(device)
    conv_pool = pages[:, : columns * D].view(SLOTS, columns, D).transpose(1, 2)
    return gated_delta_net.LayerState(
        key_heads=H,
        value_heads=HV,
        key_size=K,
        value_size=V,
        conv_weight=torch.randn(D, W).to(device),
        conv_bias=None,
        activation="silu",
        A_log=torch.randn(HV).to(device),
        dt_bias=torch.randn(HV).to(device),
        allow_neg_eigval=True,
        conv_pool=conv_pool,
        state_pool=pages[:, columns * D : columns * D + HV * V * K].view(SLOTS, HV, V, K),
    )


NORM = {"norm_weight": torch.rand(V), "norm_activation": "silu", "norm_eps": 1e-5}


@dataclass
class Sequence:
    tokens: int
    state_indices: list[int]  # one, or one for each draft
    has_initial_state: bool = True
    accepted: int = 1


def wanted(layer: gated_delta_net.LayerState, sequence: Sequence, x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """o [tokens, HV, V] of one sequence, from the pools as they are, in float64."""
    first = sequence.accepted - 1
    columns = layer.conv_pool[sequence.state_indices[0], :, first : first + W - 1].cpu().double()
    state = layer.state_pool[sequence.state_indices[first]].cpu().double()
    if not sequence.has_initial_state:
        columns, state = torch.zeros_like(columns), torch.zeros_like(state)
    mixed, _ = reference.causal_conv1d(
        x[None].cpu().double(), layer.conv_weight.cpu().double(), initial_state=columns[None], activation="silu"
    )
    q, k, v = layer.split_heads(mixed)
    o, _ = reference.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        a[None].cpu().double(),
        beta=b[None].cpu().double(),
        initial_state=state[None],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=layer.A_log.cpu().double(),
        dt_bias=layer.dt_bias.cpu().double(),
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        state_v_first=True,
    )
    return o[0]


def batch_of(
    decodes: list[Sequence], prefills: list[Sequence], spec_decodes: list[Sequence], device: torch.device
) -> Any:
    """vLLM's metadata. With drafts in the batch, its tokens come mixed: here each second row is a draft's."""
    non_spec = decodes + prefills
    tokens = sum(s.tokens for s in non_spec + spec_decodes)
    spec_tokens = sum(s.tokens for s in spec_decodes)

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def cu_seqlens(sequences: list[Sequence]) -> Tensor:
        return ints([0, *torch.tensor([s.tokens for s in sequences]).cumsum(0).tolist()])

    order = torch.arange(tokens).view(-1)
    is_spec = torch.zeros(tokens, dtype=torch.bool)
    is_spec[torch.linspace(0, tokens - 1, max(spec_tokens, 1)).long()[:spec_tokens]] = True
    return SimpleNamespace(
        num_actual_tokens=tokens,
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        num_spec_decodes=len(spec_decodes),
        spec_sequence_masks=torch.ones(1, dtype=torch.bool) if spec_decodes else None,
        spec_token_indx=order[is_spec].to(device),
        non_spec_token_indx=order[~is_spec].to(device),
        non_spec_state_indices_tensor=ints([s.state_indices[0] for s in non_spec]),
        non_spec_query_start_loc=cu_seqlens(non_spec),
        has_initial_state=torch.tensor([s.has_initial_state for s in non_spec], device=device) if prefills else None,
        spec_state_indices_tensor=ints([s.state_indices for s in spec_decodes]),
        spec_query_start_loc=cu_seqlens(spec_decodes),
        num_accepted_tokens=ints([s.accepted for s in spec_decodes]),
    )


DECODES = [Sequence(1, [3]), Sequence(1, [7])]
PREFILLS = [Sequence(5, [1], has_initial_state=False), Sequence(70, [8])]
SPEC_DECODES = [Sequence(4, [2, 4, 5, 6], accepted=3)]


@pytest.mark.parametrize(
    "decodes, prefills, spec_decodes",
    [
        (DECODES, [], []),
        ([], PREFILLS, []),
        (DECODES, PREFILLS, []),
        ([], [], SPEC_DECODES),
        ([], PREFILLS, SPEC_DECODES),
    ],
    ids=["decodes", "prefills", "decodes and prefills", "drafts", "prefills and drafts"],
)
def test_each_sequence_equals_the_references(
    decodes: list[Sequence], prefills: list[Sequence], spec_decodes: list[Sequence], device: torch.device
) -> None:
    layer, metadata = layer_on(device), batch_of(decodes, prefills, spec_decodes, device)
    tokens = metadata.num_actual_tokens
    x, b, a = (torch.randn(tokens + 2, n).to(device) for n in (D, HV, HV))
    out = torch.full((tokens + 2, HV, V), 7.0, device=device)
    rows = torch.arange(tokens, device=device)
    if spec_decodes:
        rows = torch.cat([metadata.non_spec_token_indx, metadata.spec_token_indx])
    expected, first = [], 0
    for sequence in decodes + prefills + spec_decodes:
        own = rows[first : first + sequence.tokens]
        expected.append(wanted(layer, sequence, x[own], b[own], a[own]))
        first += sequence.tokens
    gated_delta_net.forward(layer, metadata, x, b, a, out)
    assert out[tokens:].count_nonzero() == 0  # rows of padding
    first = 0
    for sequence, want in zip(decodes + prefills + spec_decodes, expected, strict=True):
        own = rows[first : first + sequence.tokens]
        assert_close("o", out[own], want, 1e-4, head_dim=1)
        first += sequence.tokens


def test_rows_beyond_the_decodes_are_padding(device: torch.device) -> None:
    """num_actual_tokens counts padded rows where the engine pads a batch of decodes. Such rows are zero, since routers
    behind the layer read them."""
    layer, metadata = layer_on(device), batch_of(DECODES, [], [], device)
    metadata.num_actual_tokens = 5
    x, b, a = (torch.randn(5, n).to(device) for n in (D, HV, HV))
    expected = [wanted(layer, s, x[i : i + 1], b[i : i + 1], a[i : i + 1]) for i, s in enumerate(DECODES)]
    x[2:], b[2:], a[2:] = torch.nan, torch.nan, torch.nan
    before, out = layer.state_pool.clone(), torch.full((5, HV, V), 7.0, device=device)
    gated_delta_net.forward(layer, metadata, x, b, a, out)
    assert_close("o", out[:2], torch.cat(expected), 1e-4, head_dim=1)
    assert out[2:].count_nonzero() == 0
    others = [slot for slot in range(SLOTS) if slot not in (3, 7)]
    assert torch.equal(layer.state_pool[others], before[others])


def test_without_tokens_all_rows_are_padding(device: torch.device) -> None:
    layer = layer_on(device)
    out = torch.full((2, HV, V), 7.0, device=device)
    nothing = torch.zeros(2, D, device=device)
    gated_delta_net.forward(layer, SimpleNamespace(num_actual_tokens=0), nothing, nothing, nothing, out)
    assert out.count_nonzero() == 0


@pytest.mark.parametrize("spec_decodes", [[], SPEC_DECODES], ids=["decodes", "drafts"])
def test_a_decode_is_the_rule_and_the_norm_in_one(
    spec_decodes: list[Sequence], device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Both pools get the same bits; rows behind the batch are padding."""
    layer = layer_on(device)
    layer.norm = NORM | {"norm_weight": NORM["norm_weight"].to(device)}
    other = replace(layer, conv_pool=layer.conv_pool.clone(), state_pool=layer.state_pool.clone())
    metadata = batch_of([] if spec_decodes else DECODES, [], spec_decodes, device)
    tokens = metadata.num_actual_tokens
    qkv, z, b, a = (torch.randn(tokens + 2, n).to(device) for n in (D, HV * V, HV, HV))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    result = gated_delta_net.decode(layer, metadata, qkv, z, b, a)
    assert result is not None and result.shape == (tokens + 2, HV, V)
    assert result[tokens:].count_nonzero() == 0
    o = torch.empty_like(result)
    gated_delta_net.forward(other, metadata, qkv, b, a, o)
    z = z[:tokens].unflatten(-1, (HV, V))
    normed = torch.ops.gdn.rms_norm_gated(o[:tokens], z, layer.norm["norm_weight"], "silu", 1e-5)
    assert torch.equal(layer.conv_pool, other.conv_pool) and torch.equal(layer.state_pool, other.state_pool)
    assert_close("o", result[:tokens].cpu(), normed.cpu().double(), 4e-7, head_dim=1)


def test_other_batches_and_layers_are_no_decodes() -> None:
    cpu = torch.device("cpu")
    layer = layer_on(cpu)
    rows = [torch.randn(80, n) for n in (D, HV * V, HV, HV)]
    assert gated_delta_net.decode(layer, batch_of(DECODES, [], [], cpu), *rows) is None, "a layer without a norm"
    layer = replace(layer, norm=NORM)
    for batch in (batch_of(DECODES, PREFILLS, [], cpu), batch_of(DECODES, [], SPEC_DECODES, cpu)):
        assert gated_delta_net.decode(layer, batch, *rows) is None
    long = replace(layer, state_pool=torch.zeros(SLOTS, HV, 193, K), value_size=193, norm=NORM)
    assert gated_delta_net.decode(long, batch_of(DECODES, [], [], cpu), *rows) is None
