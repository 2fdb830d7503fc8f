"""Knows where the models of each version of transformers find their functions, and patches those names.

Until 5.12 a layer stores the functions in its attributes when it is built. A property of the class then shadows the
attributes of all its layers, old and new, which keep what they had. Since 5.16 a layer looks the functions up in its
module at each call. The names in the module are then rebound.
"""

import functools
import importlib
import importlib.util
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import functional

from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers import (
    attention,
    decoder_layers,
    decoding,
    dispatch,
    experts,
    known_forms,
    norms,
    small_models,
)
from torch_gdn.integrations.transformers.calls import binder_of
from torch_gdn.integrations.transformers.dispatch import FUNCTIONS, dispatcher, noting_layer
from torch_gdn.integrations.transformers.functions import gated_norms

MODELS = tuple(small_models.DELTA_NETS)
SERVED_MODELS = tuple(model for model in MODELS if model != "qwen4_exp")  # with continuous batching
# These models have Kimi Delta Attention. They exist since 5.23.
KDA_MODELS = ("kimi_linear", "bailing_hybrid", "glm5_next")
DRAFTED_MODELS = (*SERVED_MODELS, *KDA_MODELS)  # with rollback
# These models have other rules, with short convolutions of the same form. They exist since 5.16.
CONVOLVING_MODELS = tuple(model for model in small_models.OTHERS if model not in KDA_MODELS)
# The name in the model's module, or of the layer's attribute, and the function that it means.
IN_THE_MODULE = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}
KDA_IN_THE_MODULE = {
    "chunk_kimi_delta_attention": "chunk_kda",
    "recurrent_kimi_delta_attention": "fused_recurrent_kda",
}
IN_THE_LAYER = {name.removeprefix("torch_"): function for name, function in IN_THE_MODULE.items()}
DELTA_LAYERS = ("GatedDeltaNet", "DeltaAttention", "Glm5NextTextLinearAttention")  # endings of classes
REPLACED = ("RMSNorm", "RMSNormGated", "MLP", "Attention", "SparseMoeBlock", "DecoderLayer")  # endings of classes
ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """A name of a module or class, or a dictionary's entry: its original value, and that while torch_gdn is enabled."""

    owner: Any
    name: str
    original: Any  # ABSENT if the name did not exist
    replacement: Any

    def write(self, value: Any) -> None:
        is_entry = isinstance(self.owner, dict)
        if value is ABSENT:
            (operator.delitem if is_entry else delattr)(self.owner, self.name)
        else:
            (operator.setitem if is_entry else setattr)(self.owner, self.name, value)

    def apply(self) -> None:
        self.write(self.replacement)

    def is_applied(self) -> bool:
        return values_of(self.owner).get(self.name) is self.replacement

    def revert(self) -> bool:
        """Restores the name. Does nothing and returns False if something else rebound it in the meantime."""
        if is_applied := self.is_applied():
            self.write(self.original)
        return is_applied

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}" if isinstance(self.owner, type) else self.name


def values_of(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def modeling_module(model: str) -> ModuleType | None:
    """Returns None if this version of transformers has no such model."""
    package = f"transformers.models.{model}"
    if importlib.util.find_spec(package) is None:
        return None
    return importlib.import_module(f"{package}.modeling_{model}")


def learn_shared() -> None:
    """Learns what the models' modules import: the activation, and the experts' gate."""
    known_forms.learn_silu()
    functions = experts.interface() or {}
    list(map(experts.is_known_function, (functions[name] for name in experts.IMPLEMENTATIONS if name in functions)))


def learn(module: ModuleType) -> None:
    """Learns the classes of a model's module, without a change to them."""
    learn_shared()
    list(kda_patches(module) if any(name in vars(module) for name in KDA_IN_THE_MODULE) else patches_of(module))


def patches_of(module: ModuleType) -> Iterator[Patch]:
    for owner in known_forms.classes(module, "ShortConvolution"):  # OLMo-Hybrid's, until 5.12
        yield patch(owner, "forward", "short_convolution")
    for owner in norms.gated_norm_classes(module):
        yield patch(owner, "forward", "rms_norm_gated")
        gated_norms.add(owner)
    yield from layer_patches(module)
    kept_in_layers = hasattr(module, "is_fast_path_available")  # until 5.12, read by the layers' constructor
    if not kept_in_layers:
        functions = [patch(module, *names) for names in IN_THE_MODULE.items() if names[0] in vars(module)]
        yield from functions  # an untested version may lack some
        yield from in_place_patches(module, functions)
        return
    for layer in known_forms.classes(module, "GatedDeltaNet"):
        yield rebind(layer, "forward", noting_layer)
        for name, function in IN_THE_LAYER.items():
            yield Patch(layer, name, vars(layer).get(name, ABSENT), attribute(name, function))


def kda_patches(module: ModuleType) -> Iterator[Patch]:
    """Patches a model of Kimi Delta Attention: its rule, norms, short convolutions and blocks."""
    for name, function in KDA_IN_THE_MODULE.items():
        if name in vars(module):
            yield patch(module, name, function)
    for layer in known_forms.classes(module, DELTA_LAYERS):
        yield rebind(layer, "forward", noting_layer)
    yield from layer_patches(module)
    yield from convolution_patches(module)


def unknown_to(module: ModuleType, patches: list[Patch]) -> tuple[str, ...]:
    """Names the classes of the language model that are usually replaced, but not in this version."""
    replaced = [each.owner for each in patches]
    owners = [owner for ending in REPLACED for owner in known_forms.classes(module, ending)]
    return tuple(owner.__name__ for owner in owners if "Vision" not in owner.__name__ and owner not in replaced)


def layer_patches(module: ModuleType) -> Iterator[Patch]:
    """Patches norms, decoder layers, MLPs, attention layers or their rotation, and blocks of experts."""
    for owner in norms.norm_classes(module):
        yield patch(owner, "forward", "rms_norm")
    for owner in decoder_layers.layer_classes(module):
        yield patch(owner, "forward", "decoder_layer")
    for owner in decoder_layers.mlp_classes(module):
        yield patch(owner, "forward", "mlp")
    attention.rotations.pop(module.__name__, None)
    if attention.has_known_rotation(module):
        rotation = patch(module, attention.ROTATION, "rotation")
        attention.rotations[module.__name__] = rotation.original, rotation.replacement
        yield rotation
    for owner in attention.attention_classes(module):  # they must have the rotation that is known now
        yield patch(owner, "forward", "attention")
    for owner in experts.block_classes(module):
        yield patch(owner, "forward", "moe_block")


def experts_patches() -> Iterator[Patch]:
    """Patches the functions with which every model computes its experts, and adds one that you can choose by name.

    They are those of the class, as for `register`: an entry of the object would hide what a user registers.
    """
    functions: Any = getattr(experts.interface(), "_global_mapping", None)
    known = [] if functions is None else [name for name in experts.IMPLEMENTATIONS if name in functions]
    for name in known:
        original = functions[name]
        if not experts.is_known_function(original):
            continue
        result = [Patch(functions, name, original, dispatcher("experts", original, owner=functions))]
        if name == "grouped_mm":
            ours = dispatcher("experts", original, everywhere=True, owner=functions)
            result.append(Patch(functions, experts.NAME, ABSENT, ours))
        experts.known_functions.update(patch.replacement for patch in result)
        yield from result


def in_place_patches(module: ModuleType, functions: list[Patch]) -> Iterator[Patch]:
    """Patches layers that pass their options on to the rule."""
    in_place = importlib.import_module("torch_gdn.integrations.transformers.in_place")
    for rule in (x for x in functions if x.name == "torch_recurrent_gated_delta_rule"):
        for layer in known_forms.classes(module, "GatedDeltaNet"):
            decoding.layers.add(layer)
            plain.learn(layer)
            bind = decoding.binder_of(layer)
            yield rebind(layer, "forward", functools.partial(in_place.forward_with_cached_state, bind, rule, functions))


def convolution_patches(module: ModuleType) -> Iterator[Patch]:
    """Patches only the convolutions of a model with another rule."""
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        if not hasattr(module, "is_fast_path_available") and callable(vars(module).get(name)):
            yield patch(module, name, IN_THE_MODULE[name])


def patch(owner: Any, name: str, function: str) -> Patch:
    original = vars(owner)[name]
    replacement = dispatcher(function, original, owner=owner)
    if isinstance(owner, type):
        replacement = with_checkpoints(owner, replacement)
        plain.learn(owner, replacement)
    return Patch(owner, name, original, replacement)


def with_checkpoints(owner: type, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer's forward as transformers wraps a subclass's. Since 5.23, only a class's outermost forward
    checkpoints gradients, so the original, called by another one, does not.
    """
    base = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
    if not issubclass(owner, base):
        return forward
    wrapper: Any = type(owner.__name__, (base,), {"forward": forward})
    result: Callable[..., Any] = wrapper.forward
    return result


def rebind(owner: Any, name: str, hook: Callable[..., Any]) -> Patch:
    """Rebinds a name, or a dictionary's entry. `hook` gets its value and the arguments of each call.

    Whoever keeps the replacement beyond disable(), as accelerate's hooks do, then gets the original.
    """
    original = values_of(owner)[name]

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs) if dispatch.enabled else original(*args, **kwargs)

    return Patch(owner, name, original, call)


def attribute(name: str, function: str) -> property:
    """Shadows the layers' own attribute of that name. Its value has the arguments of torch_gdn's function."""
    binder = binder_of(FUNCTIONS[function], FUNCTIONS[function].run)  # originals are not known yet

    def read(layer: Any) -> Callable[..., Any]:
        if name not in layer.__dict__:
            raise AttributeError(name)  # torch.nn.Module then looks among the submodules
        original = layer.__dict__[name]
        own = functools.partial(convolution_of, layer) if original is None else original
        return dispatcher(function, own, owner=layer, binder=binder)

    def write(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value

    return property(read, write)


def convolution_of(layer: Any, *, x: Tensor, **others: Any) -> Tensor:
    """Returns what a layer until 5.12 computes if its `causal_conv1d_fn` is None."""
    return functional.silu(layer.conv1d(x)[:, :, : x.shape[-1]])
