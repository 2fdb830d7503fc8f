"""Tests that what a user changed in a model stays in effect on mps: each change of each module gives the logits that it
gives without torch_gdn, for a prompt and for two decoded tokens.

A change that torch_gdn ignored would be seen only in the path that computes the module, so several modules that no path
shares are changed at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from tests.helpers.devices import ready
from tests.integrations import models
from tests.integrations.models import distance, random_model
from tests.sweeps import share_of
from torch_gdn.integrations import plain, transformers

CPU = torch.device("cpu")
KINDS = [kind for kind in (*models.KINDS, "kimi_linear", "bailing_hybrid") if models.available(kind)]
# torch_gdn runs only the convolutions, norms, MLPs and experts of lfm2_moe.
CHANGED_KINDS = [*KINDS, *(kind for kind in ("glm5_next", "lfm2_moe") if models.available(kind))]
METHODS = ("_norm", "_apply_gate", "fix_query_key_value_ordering")  # that a class's forward calls
PARTS = {"linear_attn": "mixer", "self_attn": "mixer", "conv": "mixer", "mlp": "mlp", "feed_forward": "mlp"}
Changes = Iterator[None]
Change = Callable[[nn.Module, str], AbstractContextManager[Any]]  # of the module with a name, while the context lasts


def shifted(x: Any) -> Any:
    """Returns another tensor. A norm would undo a change of the scale alone."""
    return 0.5 * x + 0.05 if isinstance(x, Tensor) and x.is_floating_point() else x


def changed(results: Any) -> Any:
    """Changes a module's results or arguments. Containers other than tuples and dictionaries stay."""
    if type(results) is tuple:
        return tuple(shifted(x) for x in results)
    return {name: shifted(x) for name, x in results.items()} if type(results) is dict else shifted(results)


# ---- changes of one module, as context managers ----------------------------------------------------------------------


@contextmanager
def another_class(model: nn.Module, name: str) -> Changes:
    module = model.get_submodule(name)
    theirs: Any = type(module)

    class Changed(theirs):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return changed(super().forward(*args, **kwargs))

    module.__class__ = Changed
    try:
        yield
    finally:
        module.__class__ = theirs


@contextmanager
def another_method(model: nn.Module, name: str) -> Changes:
    """Overrides what a class's forward calls, without a forward of its own."""
    module = model.get_submodule(name)
    theirs: Any = type(module)
    names = [each for each in METHODS if hasattr(theirs, each)]

    def of(each: str) -> Callable[..., Any]:
        return lambda self, *args: changed(getattr(theirs, each)(self, *args))

    module.__class__ = type("Changed", (theirs,), {each: of(each) for each in names})
    try:
        yield
    finally:
        module.__class__ = theirs


def its_own(names: Sequence[str], calls: str = "") -> Change:
    """Gives an object functions of its own, which change the results of its class's, or of the method `calls`."""

    def change(model: nn.Module, name: str) -> AbstractContextManager[Any]:
        module = model.get_submodule(name)
        theirs = {each: getattr(module, calls or each) for each in names if hasattr(module, each)}
        return patch.multiple(module, **{each: changing(function) for each, function in theirs.items()})

    return change


def changing(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: changed(function(*args, **kwargs))


class Wrapper(nn.Module):
    """Has the attributes of the module inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inside" else getattr(self.inside, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return changed(self.inside(*args, **kwargs))


@contextmanager
def a_wrapper(model: nn.Module, name: str) -> Changes:
    module = model.get_submodule(name)
    model.set_submodule(name, Wrapper(module))
    try:
        yield
    finally:
        model.set_submodule(name, module)


def local_hook(register: str, hook: Callable[..., Any], **options: Any) -> Change:
    return lambda model, name: getattr(model.get_submodule(name), register)(hook, **options)


def global_hook(register: str, hook: Callable[..., Any], **options: Any) -> Change:
    def change(model: nn.Module, name: str) -> Any:
        module = model.get_submodule(name)

        def only(each: nn.Module, *args: Any) -> Any:
            return hook(each, *args) if each is module else None

        return getattr(global_hooks, register)(only, **options)

    return change


def after(module: nn.Module, *args_and_result: Any) -> Any:
    return changed(args_and_result[-1])


def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return changed(args)


def before_with_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return changed(args), changed(kwargs)


class Int8(Tensor):
    """A weight that is stored as codes. Operations of others than PyTorch do not know it."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Int8:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":
            raise NotImplementedError(f"{func} is not implemented for Int8")
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        args, kwargs = tree_map(lambda x: x.codes.float() / 64 if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shifted(x)


def own_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def other_weights(make: Callable[[Tensor], Tensor]) -> Any:
    @contextmanager
    def change(model: nn.Module, name: str) -> Changes:
        module = model.get_submodule(name)
        weights = own_weights(module)
        for each, weight in weights:
            setattr(module, each, nn.Parameter(make(weight.data), requires_grad=False))
        try:
            yield
        finally:
            for each, weight in weights:
                setattr(module, each, weight)

    return change


@contextmanager
def a_parametrisation(model: nn.Module, name: str) -> Changes:
    module = model.get_submodule(name)
    names = [each for each, _ in own_weights(module)]
    for each in names:
        parametrize.register_parametrization(module, each, Shift())
    try:
        yield
    finally:
        for each in names:
            parametrize.remove_parametrizations(module, each, leave_parametrized=False)


def in_int8(weight: Tensor) -> Tensor:
    return Int8((weight * 64).round().to(torch.int8))


HOOKS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "hook": ("forward_hook", after, {}),
    "hook with names": ("forward_hook", after, {"with_kwargs": True}),
    "hook always called": ("forward_hook", after, {"always_call": True}),
    "hook before": ("forward_pre_hook", before, {}),
    "hook before with names": ("forward_pre_hook", before_with_names, {"with_kwargs": True}),
}
CHANGES: dict[str, Change] = {
    "another class": another_class,
    "another class's method": another_method,
    "its own method": its_own(METHODS),
    "its own forward": its_own(["forward"]),
    "a compiled call": its_own(["_compiled_call_impl"], "_call_impl"),  # as module.compile() sets it
    "a wrapper": a_wrapper,
    **{f"local {name}": local_hook(f"register_{kind}", *rest[:1], **rest[1]) for name, (kind, *rest) in HOOKS.items()},
    **{
        f"global {name}": global_hook(f"register_module_{kind}", hook, **options)
        for name, (kind, hook, options) in HOOKS.items()
        if "before with names" not in name  # PyTorch has no such global hook
    },
    "codes": other_weights(in_int8),
    "another dtype": other_weights(lambda weight: weight.bfloat16()),
    "a parametrisation": a_parametrisation,
}
ON_WEIGHTS = ("codes", "another dtype", "a parametrisation")
ON_METHODS = ("another class's method", "its own method")
WITHOUT_METHODS = ("olmo_hybrid", "bailing_hybrid", "kimi_linear")
CASES = [
    (kind, change)
    for kind in CHANGED_KINDS
    for change in CHANGES
    if kind not in WITHOUT_METHODS or change not in ON_METHODS
]


# ---- every module in turn --------------------------------------------------------------------------------------------


def place_of(name: str) -> tuple[str, str]:
    """Returns the layer, and the part of it, within which a path may compute several modules."""
    before, _, rest = name.partition("layers.")
    index, _, part = rest.partition(".")
    if not rest or before not in ("model.", "model.language_model."):
        return "", ""
    return index, PARTS.get(part.partition(".")[0], "layer")


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """Puts the modules in groups that have at most one in each place. A layer's norms go with no part of the layer."""
    places: dict[tuple[str, str], list[str]] = {}
    for name in names:
        places.setdefault(place_of(name), []).append(name)
    layer_results = [result for (_, part), result in places.items() if part == "layer"]
    part_results = [result for (_, part), result in places.items() if part != "layer"]
    rows = [*zip_longest(*layer_results), *zip_longest(*part_results)]
    return [[name for name in row if name is not None] for row in rows]


def logits(model: Any, device: torch.device, change: Any, group: Sequence[str]) -> Tensor:
    with ExitStack() as stack:
        for name in group:
            stack.enter_context(change(model, name))
        return models.decode(model, device, prompt=5, steps=(1, 1)).cpu()


def runs(model: Any, change: Any, name: str) -> bool:
    try:
        return bool(logits(model, CPU, change, [name]).isfinite().all())
    except RuntimeError:  # transformers multiplies only tensors of one dtype
        return False


def bound(model: Any, change: str, group: Sequence[str], exact: Tensor) -> float:
    """transformers rounds the rows of bfloat16 experts to bfloat16. A row whose last bit in float32 differs may be
    rounded the other way, which moves these logits by 3e-5 to 3e-4. Without such rounding they are 1e-3 to 3e-3 off.
    """
    experts = [name for name in group if name.endswith("experts")] if change == "another dtype" else []
    if not experts:
        return 2e-5
    with ExitStack() as stack:
        for name in experts:
            stack.enter_context(other_weights(lambda weight: weight.bfloat16().float())(model, name))
        return distance(logits(model, CPU, CHANGES[change], [x for x in group if x not in experts]), exact) / 2


@pytest.mark.sweep(24)
@pytest.mark.parametrize(("kind", "change"), CASES)
@torch.no_grad()
def test_each_module_that_was_changed(kind: str, change: str) -> None:
    model, make = random_model(kind), CHANGES[change]
    names = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
    names = [name for name in names if not name.startswith("model.visual")]  # no image is given
    if change in ON_WEIGHTS:
        names = [name for name in names if own_weights(model.get_submodule(name))]
    if change in ON_METHODS:
        names = [name for name in names if any(hasattr(model.get_submodule(name), each) for each in METHODS)]
    if change == "another dtype":
        names = [name for name in names if runs(model, make, name)]
    groups = groups_of(names)
    unchanged, expected = logits(model, CPU, make, []), [logits(model, CPU, make, group) for group in groups]
    assert any(distance(x, unchanged) > 1e-4 for x in expected)
    sample = share_of([*zip(groups, expected, strict=True)], 4)
    bounds = [bound(model, change, group, exact) for group, exact in sample]
    on_device = copy.deepcopy(model).to(ready("mps"))
    with models.torch_gdn_enabled():
        off = [(group, distance(logits(on_device, ready("mps"), make, group), exact)) for group, exact in sample]
    assert not [(*each, limit) for each, limit in zip(off, bounds, strict=True) if not each[1] < limit]


REGISTER = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("register", REGISTER)
def test_a_module_with_any_hook_is_called(register: str) -> None:
    """Those that only a backward pass calls too."""
    linear = nn.Linear(2, 2)
    hooked = (getattr(linear, f"register_{register}"), getattr(global_hooks, f"register_module_{register}"))
    for add in hooked:
        handle = add(lambda *_: None)
        assert "hook" in plain.change_of(linear, plain.LINEARS)
        handle.remove()
    assert plain.change_of(linear, plain.LINEARS) == ""


# ---- other changes ---------------------------------------------------------------------------------------------------


def compared(model: Any, change: Callable[[Any], Any] = lambda model: None) -> None:
    """Asserts that a changed model has the same logits with torch_gdn as without."""
    change(model)
    on_device = copy.deepcopy(model).to(ready("mps"))
    expected = models.decode(model, CPU, prompt=5, steps=(1, 1))
    with models.torch_gdn_enabled():
        result = models.decode(on_device, ready("mps"), prompt=5, steps=(1, 1))
    assert distance(result, expected) < 2e-5


NORMS = ("layers.0.input_layernorm", "layers.1.post_attention_layernorm", "layers.1.self_attn.q_norm", "norm")


@pytest.mark.parametrize("norm", [nn.RMSNorm, lambda size: nn.Identity()], ids=["RMSNorm", "Identity"])
@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_norms_of_torch_in_the_place_of_a_models(name: str, norm: Callable[[int], nn.Module]) -> None:
    model = random_model("qwen3_next")
    compared(model, lambda model: model.model.set_submodule(name, norm(*model.model.get_submodule(name).weight.shape)))


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
@torch.no_grad()
def test_norms_of_q_and_k_with_different_eps(name: str) -> None:
    compared(random_model("qwen3_next"), lambda x: setattr(getattr(x.model.layers[1].self_attn, name), "eps", 0.5))


@pytest.mark.parametrize("when", ["before enable()", "after enable()"])
@pytest.mark.parametrize(
    "name",
    ["Qwen3NextRMSNorm.forward", "Qwen3NextRMSNorm._norm", "Qwen3NextTopKRouter.forward", "apply_rotary_pos_emb"],
)
@torch.no_grad()
def test_functions_that_were_rebound(name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After enable(), the function in place is torch_gdn's, and the new one calls it."""
    model = random_model("qwen3_next")
    module = models.modeling_module("qwen3_next")
    owner, _, attribute = name.rpartition(".")
    holder = getattr(module, owner) if owner else module

    def rebind(patching: pytest.MonkeyPatch = monkeypatch) -> None:
        patching.setattr(holder, attribute, changing(getattr(holder, attribute)))

    on_device = copy.deepcopy(model).to(ready("mps"))
    with monkeypatch.context() as patched:
        rebind(patched)
        expected = models.decode(model, CPU, prompt=5, steps=(1, 1))
    if when == "before enable()":
        rebind()
    transformers.enable()
    try:
        if when == "after enable()":
            rebind()
        result = models.decode(on_device, ready("mps"), prompt=5, steps=(1, 1))
    finally:
        monkeypatch.undo()
        transformers.disable()
    assert distance(result, expected) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "mps"])
@torch.no_grad()
def test_autocast(kind: str, device: str) -> None:
    model = random_model(kind).to(ready(device))
    with torch.autocast(device, torch.bfloat16):
        expected = models.decode(model, torch.device(device), prompt=5, steps=(1, 1))
        with models.torch_gdn_enabled():
            result = models.decode(model, torch.device(device), prompt=5, steps=(1, 1))
            fallbacks = transformers.status().fallbacks
    assert torch.equal(result, expected)
    assert all("autocast is on" in reason for reasons in fallbacks.values() for reason in reasons)
    assert fallbacks


@torch.no_grad()
def test_modules_that_accelerate_hooked_while_enabled_are_transformers_own_after_disable() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = random_model("qwen3_next")
    on_device = copy.deepcopy(model).to(ready("mps"))
    with models.torch_gdn_enabled():
        for module in on_device.modules():
            hooks.add_hook_to_module(module, hooks.ModelHook())
    expected = models.decode(on_device, ready("mps"), prompt=5, steps=(1, 1))
    ran, status = transformers.status().ran, transformers.status()
    assert not ran and not status.fallbacks and status.running == 0
    hooks.remove_hook_from_submodules(on_device)
    assert torch.equal(models.decode(on_device, ready("mps"), prompt=5, steps=(1, 1)), expected)


ROUNDED = {
    "model.layers.0": ("linear_attn", "linear_attn.in_proj_ba", "mlp.shared_expert.up_proj"),
    "model.layers.1": ("self_attn", "self_attn.q_proj", "self_attn.k_proj", "mlp.shared_expert.gate_proj"),
}


@pytest.mark.parametrize("name", [f"{layer}.{name}" for layer, names in ROUNDED.items() for name in names])
@torch.no_grad()
def test_a_module_between_fused_ones_that_returns_another_dtype(name: str) -> None:
    """transformers promotes it. torch_gdn's ops refuse mixed dtypes."""
    model = random_model("qwen3_next")

    def rounded(module: nn.Module, args: Any, y: Any) -> Any:
        return (y[0].bfloat16(), *y[1:]) if isinstance(y, tuple) else y.bfloat16()

    model.get_submodule(name).register_forward_hook(rounded)
    on_device = copy.deepcopy(model).to(ready("mps"))
    expected = models.decode(model, CPU, prompt=5, steps=(1, 1))
    with models.torch_gdn_enabled():
        assert distance(models.decode(on_device, ready("mps"), prompt=5, steps=(1, 1)), expected) < 2e-3
