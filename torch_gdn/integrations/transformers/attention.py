"""Speeds up attention layers of transformers' models on mps: everything around the attention itself.

In Qwen3-Next, Qwen3.5 and Lara-4-Mini the norms and the rotation of q and k are one launch, and so is the gate of
Qwen's output. Other models keep their layer, and its rotation alone is one launch.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers import known_forms, norms
from torch_gdn.integrations.transformers.functions import Function, are_alike, common_reason, grad_reason
from torch_gdn.integrations.transformers.refusal import form, refusal_of
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

ROTATION = "apply_rotary_pos_emb"
INTERFACES = "ALL_ATTENTION_FUNCTIONS"  # a model module's functions by implementation
TRIAL = "torch_gdn's trial"
OWN_ATTENTION = "eager_attention_forward"  # the module's own function, if there is no other
Tables = tuple[Tensor, Tensor]
modules: dict[type, ModuleType] = {}  # the module that defines each attention layer's class
rotations: dict[str, tuple[Any, Any]] = {}  # by the module's name: its own rotation, and torch_gdn's
# Whether q's projection has the output's gate too, by class. A layer without one tells the attention its window, and
# does not rotate if it gets no tables.
gated: dict[type, bool] = {}


def attention_classes(module: ModuleType) -> Iterator[type]:
    """Yields the module's attention layers with norms of heads and a rotation, and with or without a gate."""
    if not hasattr(getattr(module, INTERFACES, None), "get_interface") or not hasattr(module, OWN_ATTENTION):
        return
    for owner in known_forms.classes(module, "Attention"):
        modules[owner] = module
        if is_known(owner):
            yield owner


@plain.once_per_code
def is_known(owner: type) -> bool:
    takes = inspect.signature(owner.__init__).parameters  # type: ignore[misc]
    if "layer_idx" not in takes:
        return False
    module = modules[owner]
    interface = getattr(module, INTERFACES)
    interface[TRIAL] = attention_of_trial
    try:
        build = functools.partial(owner, layer_idx=0)
        options = {"_attn_implementation": TRIAL, "sliding_window": 2}
        for gated[owner] in (True, False):
            calls = functools.partial(attention_calls, module.DynamicCache, gated[owner])
            if known_forms.has_form(build, calls, FUNCTIONS["attention"], options):
                return True
        return False
    finally:
        del interface[TRIAL]


def attention_calls(kind: Callable[[], Any], is_gated: bool, run: Callable[..., Any]) -> list[Any]:
    """Calls a layer with a prompt padded on the left, two single tokens after it, and packed sequences. A layer without
    a gate rotates whole heads, and runs the last ones without tables too.

    Returns its results, what it tells a cache of this kind, and what the cache then holds.
    """
    x, angles, result = torch.randn(2, 5, 32), torch.randn(2, 5, 4 if is_gated else 8), []
    seen = torch.ones(2, 1, 5, 5).tril().bool()
    seen[1, :, :, :2] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    cache = kind()
    update, told = cache.update, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        told.append((len(args), repr(sorted(kwargs.items()))))
        return update(*args, **kwargs)

    cache.update = recorded
    for start, end in ((0, 3), (3, 4), (4, 5)):
        arguments = {"position_embeddings": tables(angles[:, start:end]), "position_ids": torch.arange(start, end)}
        arguments |= {"attention_mask": mask[:, :, start:end, :end], CACHE_NAMES.model: cache}
        result.append(run(hidden_states=x[:, start:end], **arguments))
        layer = cache.layers[0]
        result.append([told[-1], layer.keys.clone(), layer.values.clone()])
    ends = torch.tensor([0, 5, 10])
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    for position_embeddings in (tables(angles.view(1, 10, -1)), *([] if is_gated else [None])):
        arguments = {"position_embeddings": position_embeddings, "attention_mask": None}
        result.append(run(hidden_states=x.view(1, 10, 32), **arguments, **packed))
    return result


def attention_of_trial(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Computes an attention that depends on all arguments."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT if mask is None else q @ k.mT + mask
    weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2) * known_forms.number_of(options), weights


def tables(angles: Tensor) -> Tables:
    """Returns tables as models make them, with each angle twice."""
    twice = torch.cat([angles, angles], -1)
    return twice.cos(), twice.sin()


def halves(position_embeddings: Any, batch: int) -> list[Tensor]:
    """Returns each angle once, as the op takes them, for every sequence."""
    return [table[..., : table.shape[-1] // 2].expand(batch, -1, -1) for table in position_embeddings]


@functools.cache
def no_rotation(device: torch.device) -> Tables:
    """Returns the tables of one pair, which every token rotates by 0."""
    return torch.ones(1, 1, 2, device=device), torch.zeros(1, 1, 2, device=device)


# ---- a whole layer ---------------------------------------------------------------------------------------------------


def rotation_refusal(head: int, dtype: torch.dtype, cos: Tensor, weight: Tensor | None = None) -> str:
    """Returns why the op would refuse the rotation of heads of this size. `cos` has each angle twice."""
    q, table = ((1, 1, 1, head), dtype), ((1, 1, cos.shape[-1] // 2), cos.dtype)
    weights = {"q_weight": form(weight), "k_weight": form(weight)}
    return refusal_of("qk_norm_rope", q=q, k=q, cos=table, sin=table, **weights)


def tables_reason(position_embeddings: Any) -> str:
    if not isinstance(position_embeddings, tuple | list) or len(position_embeddings) != 2:
        return "the position embeddings are not a pair of cos and sin"
    cos, sin = position_embeddings
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[-1] % 2:
        return f"the cos and sin tables have the shapes {list(cos.shape)} and {list(sin.shape)}"
    return ""


def tables_of(layer: Any, hidden_states: Tensor, position_embeddings: Any) -> Any:
    if position_embeddings is not None or gated[type(layer)]:
        return position_embeddings
    return [table.expand(1, hidden_states.shape[1], 2) for table in no_rotation(hidden_states.device)]


def attention_reason(layer: Any, hidden_states: Tensor, position_embeddings: Any, *others: Any, **options: Any) -> str:
    position_embeddings = tables_of(layer, hidden_states, position_embeddings)
    q_norm, k_norm = layer.q_norm, layer.k_norm
    if reason := norms.change_of(q_norm) or norms.change_of(k_norm) or rotation_change(modules[type(layer)]):
        return reason
    if reason := grad_reason(layer) or tables_reason(position_embeddings):
        return reason
    (cos, sin), weight, other = position_embeddings, q_norm.weight, k_norm.weight
    if type(k_norm) is not type(q_norm) or norms.eps_of(k_norm) != norms.eps_of(q_norm) or other.dtype != weight.dtype:
        return "the norms of q and k differ"
    reason = common_reason(hidden_states, cos, sin, weight, other)
    return reason or rotation_refusal(layer.head_dim, hidden_states.dtype, cos, weight)


def rotation_change(module: ModuleType) -> str:
    """Returns a reason if the module's rotation is neither its own nor torch_gdn's."""
    is_known = getattr(module, ROTATION, None) in rotations.get(module.__name__, ())
    return "" if is_known else f"{module.__name__}.{ROTATION} was replaced"


def run_attention(
    layer: Any,
    hidden_states: Tensor,
    /,
    position_embeddings: Any,
    attention_mask: Tensor | None = None,
    kv_cache: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs the layer, and passes its options on to the cache and to the attention, as transformers does."""
    batch, D = hidden_states.shape[0], layer.head_dim
    has_gate = gated[type(layer)]
    q, *gates = layer.q_proj(hidden_states).unflatten(-1, (-1, 1 + has_gate, D)).unbind(-2)
    k, v = (project(hidden_states).unflatten(-1, (-1, D)) for project in (layer.k_proj, layer.v_proj))
    if are_alike(hidden_states, q, k):
        norm, weights = layer.q_norm, (layer.q_norm.weight, layer.k_norm.weight)
        zero_centered = norms.form_of(norm).zero_centered
        angles = halves(tables_of(layer, hidden_states, position_embeddings), batch)
        q, k = torch.ops.gdn.qk_norm_rope(q, k, *angles, *weights, norms.eps_of(norm), zero_centered, True)
    else:  # a hook or another class of projection may return anything
        q, k = layer.q_norm(q).transpose(1, 2), layer.k_norm(k).transpose(1, 2)
        if position_embeddings is not None:
            q, k = getattr(modules[type(layer)], ROTATION)(q, k, *position_embeddings)
    v = v.transpose(1, 2)
    if kv_cache is not None:
        told = {"kwargs": options} if CACHE_NAMES.tells_update else {}
        k, v = kv_cache.update(k, v, layer.layer_idx, **told)
    options |= {"dropout": layer.attention_dropout if layer.training else 0.0, "scaling": layer.scaling}
    options |= {} if has_gate else {"sliding_window": layer.sliding_window}
    o, weights_of_keys = attention_of(layer)(layer, q, k, v, attention_mask, **options)
    for gate in gates:
        o = o.view(gate.shape)
        o = torch.ops.gdn.act_and_mul(gate, o, "sigmoid") if are_alike(gate, o) else o * torch.sigmoid(gate)
    return layer.o_proj(o.flatten(2)), weights_of_keys


def attention_of(layer: Any) -> Callable[..., Any]:
    """Returns the function that the layer's configuration names."""
    module = modules[type(layer)]
    result: Callable[..., Any] = getattr(module, INTERFACES).get_interface(
        layer.config._attn_implementation, getattr(module, OWN_ATTENTION)
    )
    return result


# ---- the rotation alone ----------------------------------------------------------------------------------------------


def has_known_rotation(module: ModuleType) -> bool:
    """Returns whether the module's function rotates pairs (i, i + P) and leaves the elements after 2 P."""
    rotate = vars(module).get(ROTATION)
    if rotate is None:
        return False
    with known_forms.trial():
        call = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 4, 16), *tables(torch.randn(2, 4, 4))
        try:
            expected = rotate(*call)
        except (RuntimeError, TypeError):  # it may rotate only whole heads
            call = *call[:2], *tables(torch.randn(2, 4, 8))
            expected = rotate(*call)
        result = run_rotation(*call)
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(result, expected, strict=True))


def is_rotation_elsewhere(q: Tensor, k: Tensor | None = None, *others: Any, **options: Any) -> bool:
    """Returns True for a rotation of q alone, by which Qwen4-Exp chooses keys."""
    return k is None or known_forms.runs_elsewhere(q.device) or torch.compiler.is_compiling()


def rotation_reason(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *positional: Any, unsqueeze_dim: int = 1, **others: Any
) -> str:
    if positional:
        return "arguments after sin are positional"
    if unsqueeze_dim != 1 or q.dim() != 4 or q.dtype != k.dtype:
        return f"q {list(q.shape)} and k {list(k.shape)} are rotated with unsqueeze_dim {unsqueeze_dim}"
    return tables_reason((cos, sin)) or common_reason(q, k, cos, sin) or rotation_refusal(q.shape[3], q.dtype, cos)


def run_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    rows, angles = (q.transpose(1, 2), k.transpose(1, 2)), halves((cos, sin), q.shape[0])
    result: tuple[Tensor, Tensor] = torch.ops.gdn.qk_norm_rope(*rows, *angles, heads_first=True)
    return result


FUNCTIONS = {
    "attention": Function(attention_reason, run_attention, known_forms.is_on_another_device, cache_of="model"),
    "rotation": Function(rotation_reason, run_rotation, is_rotation_elsewhere),
}
