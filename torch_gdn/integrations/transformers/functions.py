"""Defines, for each function that a Gated DeltaNet layer of transformers calls, which calls torch_gdn takes.

Each has a `reason` (why torch_gdn does not take the call, or "") and a `run`. Both have the arguments that models of
all versions pass, with the models' own names.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_gdn
from torch_gdn import causal_conv1d_interface, self_test
from torch_gdn.autograd import needs_grad
from torch_gdn.integrations.plain import DENSE
from torch_gdn.integrations.transformers.refusal import form, refusal_of
from torch_gdn.ops.convolutions import convolve

DEVICES = ("mps", "cpu")
gated_norms: set[type] = set()  # classes with the forward that `run_norm` computes
CACHED_STATE = "cached_state"  # argument with the state that the layer's cache overwrites afterwards
RECURRENT = "fused_recurrent_gated_delta_rule"
DELTA_RULES = ("chunk_gated_delta_rule", RECURRENT)
# Models pass these by place. flash-linear-attention's functions name them q, k and v.
RULE_NAMES = {name: own for own in ("query", "key", "value") for name in (own, own[0])}
COLUMN_NAMES = dict.fromkeys(("hidden_states", "x"), "hidden_states")  # x until 5.12
NEEDS_GRAD = (
    "grad mode is on and an input requires grad; torch_gdn's kernels for this are forward only "
    "(torch.no_grad() and torch.inference_mode() turn it off)"
)
AUTOCAST = "autocast is on, which chooses the dtypes of transformers' operations"
NEEDS_TANGENT = (
    "an input has a forward-mode gradient (torch.func.jvp, torch.autograd.forward_ad); torch_gdn's kernels have none"
)
KDA_FUNCTIONS = ("chunk_kda", "fused_recurrent_kda")
WITHOUT_CHUNKS = (RECURRENT, *KDA_FUNCTIONS)  # no `chunk_size`, or one that changes no result


@dataclass(frozen=True)
class Function:
    reason: Callable[..., str]
    run: Callable[..., Any]
    is_skipped: Callable[..., bool] | None = None  # whether a call goes to the original without being counted
    adds_residual: bool = False  # whether a decoder layer may give `run` a `residual`, which is added to the result
    names: Mapping[str, str] = field(default_factory=dict)  # transformers' names of what `run` calls otherwise
    ignored: tuple[str, ...] = ()  # arguments of the original that a trial shows to be without effect
    cache_of: str = ""  # the field of CacheNames with the name of the cache, which `run` calls kv_cache


def common_reason(*tensors: Tensor | None, differentiable: bool = False) -> str:
    """Checks any call: the tensors' classes and devices, autocast, and whether a gradient of either mode is needed.

    A differentiable function may take a call that needs a gradient, except in forward mode.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    if device.type not in DEVICES:
        return f"the tensors are on {device.type}; torch_gdn has kernels for {' and '.join(DEVICES)}"
    if torch.is_autocast_enabled(device.type) and not (differentiable and needs_grad(*given)):
        return AUTOCAST  # with a gradient, torch_gdn has the dtypes of calls outside autocast, and smaller errors
    for tensor in given:  # no generator, because this runs at every call
        if tensor.device != device:
            return "the tensors are on several devices"
        if type(tensor) not in DENSE:
            return f"{type(tensor).__name__} is a subclass of torch.Tensor"
    return needs_gradient(given, differentiable)


def needs_gradient(tensors: Iterable[Tensor], differentiable: bool = False) -> str:
    is_dual_level = forward_ad._current_level >= 0  # cheap, and false in nearly every call
    if not (is_dual_level or torch.is_grad_enabled()):
        return ""
    for tensor in tensors:
        if not differentiable and tensor.requires_grad and torch.is_grad_enabled():
            return NEEDS_GRAD
        if is_dual_level and forward_ad.unpack_dual(tensor).tangent is not None:
            return NEEDS_TANGENT
    return ""


def are_alike(*tensors: Tensor) -> bool:
    """Returns whether these are plain tensors of one dtype on one device, after modules that may do anything."""
    first = tensors[0]
    for tensor in tensors:
        if type(tensor) not in DENSE or tensor.dtype != first.dtype or tensor.device != first.device:
            return False
    return True


def grad_reason(layer: Any) -> str:
    """Returns why a whole layer is left to transformers if a gradient with respect to its parameters is needed."""
    return needs_gradient(layer.parameters())


def mixed_reason(query: Tensor, value: Tensor) -> str:
    """Refuses mixed dtypes: transformers' rules return o in query's dtype, torch_gdn's in value's."""
    if value.dtype == query.dtype:
        return ""
    return f"query and value have the dtypes {str(query.dtype)[6:]} and {str(value.dtype)[6:]}"


def self_test_reason(op: str, device: torch.device) -> str:
    """Returns why a call is left to transformers if its op failed the self-test and would run on the CPU."""
    return f"{op} failed the self-test on this device" if device.type == "mps" and op in self_test.on_cpu else ""


def rule_reason(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *positional: Any,
    chunk_size: int | None = 64,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    layer_states: Any = None,  # which take no part in gradients
    rule: str = "the delta rule",
    decay: str = "g",  # what the op calls g
    differentiable: bool = False,
    **others: Any,
) -> str:
    if positional:
        return "arguments after beta are positional"
    if seq_idx is not None and cu_seqlens is None:
        return f"packed sequences have seq_idx but no cu_seq_lens_q, which {rule} needs"
    differentiable = differentiable and layer_states is None
    if reason := common_reason(query, key, value, g, beta, initial_state, differentiable=differentiable):
        return reason
    batch = 1 if cu_seqlens is None else query.shape[0]
    given = {"q": query, "k": key, "v": value, decay: g, "beta": beta}
    call: dict[str, Any] = {name: form(x, 2, batch, 1) for name, x in given.items()}
    call |= {"initial_state": form(initial_state, 1, batch)}
    call |= {} if cu_seqlens is None else {"cu_seqlens": ((2,), torch.int64)}
    call |= {} if op == RECURRENT else {"chunk_size": chunk_size}
    reason = refusal_of(op, **call)
    if reason.startswith(f"{decay}: "):  # the model's name
        reason = f"g: {reason.removeprefix(f'{decay}: ')}"
    return reason or mixed_reason(query, value)


def run_rule(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,  # of the same sequences as cu_seqlens
    layer_states: Any = None,
    cached_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    norm: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if layer_states is not None:
        kept: tuple[Tensor, Tensor | None] = layer_states.delta_rule(query, key, value, g, beta, initial_state, **norm)
        return kept
    if op == RECURRENT and is_cached_state(cached_state, initial_state, output_final_state, cu_seqlens):
        assert initial_state is not None
        if not self_test_reason(f"{op}_", query.device):
            o = torch_gdn.fused_recurrent_gated_delta_rule_(query, key, value, g, beta, initial_state, **norm)
            return o, initial_state
    options: dict[str, Any] = norm | {"initial_state": initial_state, "output_final_state": output_final_state}
    options |= {"cu_seqlens": cu_seqlens} | ({} if op in WITHOUT_CHUNKS else {"chunk_size": chunk_size})
    rule: Callable[..., tuple[Tensor, Tensor | None]] = getattr(torch_gdn, op)
    return rule(query, key, value, g=g, beta=beta, **options)


def kda_reason(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *positional: Any, **given: Any
) -> str:
    """Checks a call. The chunk size does not matter, because the recurrence has the same results."""
    given |= {"rule": "Kimi Delta Attention", "decay": "gk"}
    return rule_reason(RECURRENT, query, key, value, g, beta, *positional, **given)


def is_cached_state(
    state: Tensor | None, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None
) -> bool:
    """Returns whether the rule starts from the state that the cache overwrites with the rule's result."""
    return state is not None and state is initial_state and output_final_state and cu_seqlens is None


def convolution_reason(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    layer_states: Any = None,
    **others: Any,
) -> str:
    if reason := narrowing_reason(hidden_states, weight):
        return reason
    return common_reason(hidden_states, weight, bias, seq_idx, differentiable=layer_states is None) or refusal_of(
        "causal_conv1d",
        x=((1, 1, *hidden_states.shape[1:-1]), hidden_states.dtype),
        weight=form(weight),
        bias=form(bias),
        seq_idx=form(seq_idx, 2, 1, 1),
        activation=activation,
    )


def narrowing_reason(x: Tensor, weight: Tensor) -> str:
    """Refuses a weight of fewer bits: transformers rounds the input to its dtype, and torch_gdn does not."""
    rounds = torch.promote_types(x.dtype, weight.dtype) != weight.dtype
    return f"weight: expected dtype {x.dtype} or wider, got {weight.dtype}" if rounds else ""


def update_reason(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> str:
    reason = narrowing_reason(hidden_states, weight) or common_reason(hidden_states, weight, bias, conv_state)
    reason = reason or self_test_reason("causal_conv1d_update_", hidden_states.device)
    return reason or refusal_of(
        "causal_conv1d_update_",
        x=((1, 1, *hidden_states.shape[1:-1]), hidden_states.dtype),
        weight=form(weight),
        state_pool=((1, *weight.shape), conv_state.dtype),
        bias=form(bias),
        activation=activation,
    )


def run_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    layer_states: Any = None,
) -> Tensor:
    """Returns [B, D, T], channel-last: q, k and v are then views that the delta rule takes without a copy."""
    rows = hidden_states.transpose(1, 2)
    if layer_states is not None:
        convolved: Tensor = layer_states.convolve(rows, weight, bias, activation)
        return convolved.transpose(1, 2)
    boundaries = cu_seq_lens_q if seq_idx is None else None
    y, _ = convolve(rows, weight, bias, None, None, False, None, activation, boundaries, seq_idx)
    return y.transpose(1, 2)


def run_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return causal_conv1d_interface.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


def short_convolution_reason(
    layer: Any, hidden_states: Tensor, cache: Tensor | None = None, use_precomputed: bool = False, **others: Any
) -> str:
    """Checks OLMo-Hybrid's layer until 5.12, which works on rows and passes on the last W - 1 columns."""
    weight, bias = layer.weight, layer.bias  # [D, 1, W]
    taps = (weight.shape[0], weight.shape[2])
    return common_reason(hidden_states, weight, bias, cache, differentiable=True) or refusal_of(
        "causal_conv1d",
        x=form(hidden_states, 2, 1, 1),
        weight=(taps, weight.dtype),
        bias=form(bias),
        initial_state=None if cache is None else ((1, *taps), cache.dtype),
        activation="silu",
    )


def run_short_convolution(
    layer: Any,
    /,
    hidden_states: Tensor,
    cache: Tensor | None = None,
    use_precomputed: bool = False,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:
    y, state = causal_conv1d_interface.causal_conv1d_fn(
        hidden_states.transpose(1, 2),
        layer.weight[:, 0],
        layer.bias,
        initial_states=cache if use_precomputed else None,
        return_final_states=True,
        activation="silu",
    )
    return y.transpose(1, 2), state


def norm_reason(layer: Any, hidden_states: Tensor, gate: Tensor | None = None) -> str:
    if gate is None:
        return "the gated norm has no gate"
    if gate.shape != hidden_states.shape:
        return f"the gated norm's input and gate have the shapes {list(hidden_states.shape)} and {list(gate.shape)}"
    weight = layer.weight
    reason = common_reason(hidden_states, gate, weight, differentiable=True)
    rows = {"x": form(hidden_states, -1, 0), "g": form(gate, -1, 0), "weight": form(weight)}
    device, activation = hidden_states.device.type, gate_activation(layer)  # the kernel on mps takes shorter rows
    return reason or refusal_of("rms_norm_gated", device, **rows, activation=activation)


def run_norm(layer: Any, /, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return torch_gdn.rms_norm_gated(
        hidden_states,
        gate,
        layer.weight,
        activation=gate_activation(layer),
        eps=layer.variance_epsilon,
        round_norm=True,
    )


def gate_activation(layer: Any) -> str:
    return getattr(layer, "activation", "silu")  # always silu until 5.12


FUNCTIONS = {
    op: Function(
        functools.partial(rule_reason, op, differentiable=op != RECURRENT),
        functools.partial(run_rule, op),
        names=RULE_NAMES,
    )
    for op in DELTA_RULES
}
FUNCTIONS |= {
    op: Function(
        functools.partial(kda_reason, differentiable=op == "chunk_kda"),
        functools.partial(run_rule, op),
        names=RULE_NAMES | {"cu_seq_lens_q": "cu_seqlens"},
    )
    for op in KDA_FUNCTIONS
}
FUNCTIONS |= {
    "causal_conv1d_fn": Function(convolution_reason, run_convolution, names=COLUMN_NAMES),
    "causal_conv1d_update": Function(update_reason, run_update),
    "short_convolution": Function(short_convolution_reason, run_short_convolution),
    "rms_norm_gated": Function(norm_reason, run_norm),
}
