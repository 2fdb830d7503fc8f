"""Runs mixtures of experts: transformers' experts functions, and whole blocks of Qwen's models and of those with Kimi
Delta Attention.

A model whose experts are decorated with `use_experts_implementation` calls a function by the name in its
configuration: "grouped_mm", which `generate` replaces by "batched_mm" for decoding. Both go to torch_gdn on `mps`. On
the CPU they stay transformers' own, unless the configuration names "torch_gdn".
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from torch_gdn.integrations import plain
from torch_gdn.integrations.experts import Matrix, SharedExpert, fused_experts, matrix_in
from torch_gdn.integrations.transformers import known_forms
from torch_gdn.integrations.transformers.functions import Function, common_reason
from torch_gdn.integrations.transformers.packed_layers import PackedExperts, PackedLinear, matrices_of
from torch_gdn.integrations.transformers.refusal import Form, form, refusal_of, strided

NAME = "torch_gdn"
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")  # on mps, calls by these names go to the ops
SIZES = {  # of the block that a trial builds, by the names of Qwen and of DeepSeek-V3
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 24,
    "_experts_implementation": "eager",
}
ONE_GROUP = {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}  # another block of the trial
for owner in (PackedLinear, PackedExperts):
    plain.learn(owner)
gates: set[Any] = set()  # the function act_fn(gate) * up, of experts without a method of their own


class Parts(NamedTuple):
    """The class of each part of a block, as its constructor makes them."""

    router: type
    experts: type
    shared: type


blocks: dict[type, Parts] = {}  # the classes of blocks that `run_block` computes
FLAGS = {  # attributes of experts, with the values that the ops compute
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}
PARTS_OF_EXPERTS = ("gate_up_proj", "down_proj", "act_fn", "num_experts", "_apply_gate")
in_float32: dict[type, bool] = {}  # whether a softmax router's class multiplies in float32
DEFAULT_GATE = "_default_apply_gate"  # act_fn(gate) * up, for experts without a method of their own
known_functions: set[Any] = set()  # of experts: transformers' own ones that compute the form, and torch_gdn's


def interface() -> Any:
    """Returns transformers' experts functions by name, or None for a version without them."""
    try:
        module = importlib.import_module("transformers.integrations.moe")
    except ModuleNotFoundError:
        return None
    gates.add(getattr(module, DEFAULT_GATE, None))
    return getattr(module, "ALL_EXPERTS_FUNCTIONS", None)


# ---- a model's experts -----------------------------------------------------------------------------------------------


def is_known_function(function: Callable[..., Any]) -> bool:
    """Returns whether a function of experts computes the form, and reads no attribute that `form_reason` does not."""
    default = getattr(importlib.import_module("transformers.integrations.moe"), DEFAULT_GATE, None)
    kind: Any = type("Experts", (known_forms.Options,), {"_apply_gate": default})
    with known_forms.trial():
        weights = {"gate_up_proj": torch.randn(8, 48, 32) * 32**-0.5, "down_proj": torch.randn(8, 32, 24) * 24**-0.5}
        experts = kind(act_fn=torch.nn.SiLU(), num_experts=8, **weights, **FLAGS)
        given = torch.randn(5, 32), torch.randint(0, 8, (5, 3)), torch.rand(5, 3)
        try:
            expected = function(experts, *given)
            result = run_experts(experts, *given)
        except known_forms.ERRORS:
            return False
    is_known = vars(experts)["__read__"] <= {*FLAGS, *PARTS_OF_EXPERTS} and known_forms.is_close(result, expected)
    if is_known:
        known_functions.add(function)
    return is_known


@torch.compiler.assume_constant_result
def function_change(chosen: str) -> str:
    """Returns a reason if somebody put another function in the place of the one that the block's experts call."""
    function = (interface() or {}).get(chosen)
    return "" if function in known_functions else f"the experts function {chosen} was replaced"


def form_reason(experts: Any) -> str:
    """Returns why the ops cannot compute these experts, or "" if they can."""
    for name, value in FLAGS.items():
        if getattr(experts, name, value) != value:
            return f"the experts' {name.lstrip('_')} is {not value}"
    gate = getattr(type(experts), "_apply_gate", None)
    if gate is None or gate not in gates or "_apply_gate" in vars(experts):
        return f"{type(experts).__name__} has its own gate"
    return plain.change_of(experts.act_fn, known_forms.SILU)


def experts_reason(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> str:
    if reason := form_reason(experts):
        return reason
    weights = experts.gate_up_proj, experts.down_proj
    return common_reason(hidden_states, top_k_index, top_k_weights, *weights) or experts_refusal(
        hidden_states, form(top_k_index, 1, 1), form(top_k_weights, 1, 1), *weights
    )


def experts_refusal(
    x: Tensor, ids: Form | None, weights: Form | None, gate_up: Tensor, down: Tensor, *shared: Tensor
) -> str:
    """Returns why the ops would refuse x [.., D]. `shared` has gate, up and down."""
    assert ids is not None
    gates = dict(zip(("shared_gate_proj", "shared_up_proj"), map(strided, shared), strict=False))
    call: dict[str, Any] = {"topk_ids": ids, "topk_weights": weights, "w_down": strided(down)}
    call["hidden"] = ((*ids[0], *down.shape[2:]), x.dtype)
    if shared:
        call |= {"shared_hidden": ((1, *shared[2].shape[1:]), x.dtype), "shared_down_proj": strided(shared[2])}
    refusal = refusal_of("moe_gate_up", x=form(x, -1, 1), w_gate_up=strided(gate_up), topk_ids=ids, **gates)
    return refusal or refusal_of("moe_down", **call)


def run_experts(experts: Any, hidden_states: Tensor, /, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    matrices = Matrix(experts.gate_up_proj), Matrix(experts.down_proj)
    return fused_experts(hidden_states, *matrices, top_k_weights, top_k_index)


# ---- blocks of Qwen3-Next, Qwen3.5 and Qwen4, and with DeepSeek-V3's router ------------------------------------------


def block_classes(module: ModuleType) -> Iterator[type]:
    """Yields the module's blocks with a softmax router and a shared expert that may have a weight, and those with a
    sigmoid router, whose experts are in groups, and a shared expert of weight 1.
    """
    return (owner for owner in known_forms.classes(module, ("SparseMoeBlock", "MoE")) if has_known_block(owner))


def has_known_block(owner: Any) -> bool:
    """Returns whether `run_block` computes a block, and then remembers the classes of its parts."""
    with known_forms.trial():
        try:
            block = owner(known_forms.Options(**known_forms.SIZES | SIZES))
            parts = Parts(type(block.gate), type(block.experts), type(shared_of(block)[0]))
        except known_forms.ERRORS:
            return False
    for part in parts:
        plain.learn(part)
    blocks[owner] = parts
    is_known = is_known_block(owner, *parts)
    if not is_known:
        del blocks[owner]
    return is_known


@plain.once_per_code
def is_known_block(owner: Any, *parts: type) -> bool:
    """Tries a block. The answer depends on the code of the block and of its parts."""

    def build(configuration: Any) -> Any:
        block = owner(configuration)
        if hasattr(block.gate, "e_score_correction_bias"):
            block.gate.e_score_correction_bias.normal_()
        elif type(block.gate) not in in_float32:
            in_float32[type(block.gate)] = multiplies_in_float32(block.gate)
        return block

    sizes = (SIZES, SIZES | ONE_GROUP)
    return all(known_forms.has_form(build, block_calls, FUNCTIONS["moe_block"], each) for each in sizes)


def multiplies_in_float32(gate: Any) -> bool:
    """Returns whether a router's logits are in float32 although its input and its weight are not."""
    logits, *_ = copy.deepcopy(gate).bfloat16()(torch.randn(1, 32).bfloat16())
    return bool(logits.dtype == torch.float32)


def block_calls(run: Any) -> list[Any]:
    return [run(torch.randn(2, tokens, 32)) for tokens in (5, 1)]


def implementation_of(block: Any) -> Any:
    return getattr(getattr(getattr(block, "experts", None), "config", None), "_experts_implementation", None)


def is_block_elsewhere(block: Any, hidden_states: Tensor, **options: Any) -> bool:
    chosen = implementation_of(block)
    return chosen != NAME and (chosen not in IMPLEMENTATIONS or known_forms.is_on_another_device(block, hidden_states))


def block_reason(block: Any, hidden_states: Tensor, residual: Tensor | None = None) -> str:
    experts, (shared, *gates) = block.experts, shared_of(block)
    packed = type(experts) is PackedExperts
    if change := parts_change(block, packed, shared, *gates):
        return change
    chosen = implementation_of(block)
    if not packed and chosen in IMPLEMENTATIONS and (change := function_change(chosen)):
        return change
    projections = (shared.gate_proj, shared.up_proj, shared.down_proj)
    weights = experts.gate_up_proj, experts.down_proj, *(module.weight for module in projections)
    bias = getattr(block.gate, "e_score_correction_bias", None)
    if reason := common_reason(hidden_states, block.gate.weight, bias, *weights):
        return reason
    if packed:  # their form was checked when they were packed
        return ""
    if reason := form_reason(experts):
        return reason
    chosen, (n_group, topk_group) = (1, block.gate.top_k), groups_of(block.gate)
    router = {"router_logits": ((1, len(block.gate.weight)), block.gate.weight.dtype), "top_k": block.gate.top_k}
    return experts_refusal(hidden_states, (chosen, torch.int32), (chosen, torch.float32), *weights) or refusal_of(
        "moe_router", **router, n_group=n_group, topk_group=topk_group
    )


def parts_change(block: Any, packed: bool, shared: Any, *gates: Any) -> str:
    """Returns what was changed in a part of a block that `run_block` does not call, or ""."""
    parts = blocks.get(type(block))
    if parts is None:
        return f"torch_gdn does not know {type(block).__name__}"
    if change := (
        plain.change_of(block.gate, (parts.router,))
        or plain.change_of(block.experts, (PackedExperts if packed else parts.experts,))
        or plain.change_of(shared, (parts.shared,))
        or plain.change_of(shared.act_fn, known_forms.SILU)
        or (packed and plain.change_of(block.experts.act_fn, known_forms.SILU))
    ):
        return change
    for module in (shared.gate_proj, shared.up_proj, shared.down_proj, *gates):
        is_packed = type(module) is PackedLinear and (packed or module in gates)
        if change := plain.change_of(module, (PackedLinear,) if is_packed else plain.LINEARS):
            return f"the shared expert has a layer that is not a plain linear one: {change}"
        if module.bias is not None or (is_packed and module.order is not None):
            return f"the shared expert has a {type(module).__name__} with a bias or in another order"
    return ""


def shared_of(block: Any) -> tuple[Any, ...]:
    """Returns the shared expert, and the layer that computes its weight if there is one."""
    if hasattr(block, "shared_experts"):
        return (block.shared_experts,)
    return (block.shared_expert, *([block.shared_expert_gate] if hasattr(block, "shared_expert_gate") else []))


def groups_of(gate: Any) -> tuple[int, int]:
    """Returns the number of groups, and of those whose experts can be chosen."""
    return getattr(gate, "num_group", 1), getattr(gate, "topk_group", 1)


def route(gate: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each token's weights and experts. DeepSeek's router and Lara's multiply in float32, whatever their dtypes
    are.
    """
    if (softmax := not hasattr(gate, "e_score_correction_bias")) and not in_float32.get(type(gate)):
        logits = linear(x, gate.weight)
    else:
        dtype = torch.promote_types(x.dtype, gate.weight.dtype)
        logits = torch.ops.gdn.moe_logits(x.to(dtype), gate.weight.to(dtype))
    if softmax:
        renormalize = getattr(gate, "norm_topk_prob", True)
        chosen: tuple[Tensor, Tensor] = torch.ops.gdn.moe_router(logits, gate.top_k, renormalize=renormalize)
        return chosen
    options = (*groups_of(gate), gate.norm_topk_prob, gate.routed_scaling_factor)
    chosen = torch.ops.gdn.moe_router(logits, gate.top_k, "sigmoid", gate.e_score_correction_bias, *options)
    return chosen


def run_block(block: Any, hidden_states: Tensor, /, residual: Tensor | None = None) -> Tensor:
    x, (shared, *gates) = hidden_states.flatten(0, 1), shared_of(block)
    weights, ids = route(block.gate, x)
    gate_proj, up_proj, down_proj = map(matrix_in, (shared.gate_proj, shared.up_proj, shared.down_proj))
    own = SharedExpert(gate_proj, up_proj, down_proj, gates[0] if gates else None)
    rows = None if residual is None else residual.flatten(0, 1)
    return fused_experts(x, *matrices_of(block.experts), weights, ids, own, rows).view_as(hidden_states)


FUNCTIONS = {
    "experts": Function(experts_reason, run_experts, known_forms.is_on_another_device),
    "moe_block": Function(block_reason, run_block, is_block_elsewhere, adds_residual=True),
}
