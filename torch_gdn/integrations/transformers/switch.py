"""Defines enable(), disable(), status() and supports()."""

import gc
import importlib
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from types import ModuleType
from typing import Any, Literal, NoReturn

from torch.nn import Module

from torch_gdn import self_test
from torch_gdn.integrations.transformers import comparison, dispatch, draft_choice, known_forms, versions
from torch_gdn.integrations.transformers.loading_patches import gguf_patches, memory_patches, packed_patches
from torch_gdn.integrations.transformers.packed_layers import layers_packed
from torch_gdn.integrations.transformers.patches import (
    CONVOLVING_MODELS,
    DELTA_LAYERS,
    DRAFTED_MODELS,
    KDA_MODELS,
    MODELS,
    SERVED_MODELS,
    Patch,
    convolution_patches,
    experts_patches,
    kda_patches,
    learn,
    learn_shared,
    modeling_module,
    patches_of,
    unknown_to,
)

lock = RLock()  # one thread at a time enables or disables
applied: dict[str, list[Patch]] = {}  # by model or feature; empty while disabled
left_models: dict[str, str] = {}  # models that differ on a version that nobody tested, and how
MOST_DRAFTS = 16  # tokens of a prediction layer in a step
FEATURES = {  # the module, imported on demand, and its function that yields the patches
    "continuous batching": ("continuous_batching", "serving_patches"),
    "rollback": ("rollback", "rollback_patches"),
    "drafts": ("draft_segments", "segment_patches"),
}


@dataclass(frozen=True)
class Status:
    """The result of `status()`. Its text says what matters to your model; `details()` has every name and count."""

    enabled: bool
    transformers: str  # its version
    replaced: dict[str, tuple[str, ...]]  # by model or feature: the names that are torch_gdn's
    ran: dict[str, int]  # by function: calls that ran on torch_gdn since enable(), without compiled graphs
    fallbacks: dict[str, dict[str, int]]  # by function and reason: calls that went to the original
    wrong: dict[str, str]  # by op: what the self-test found, and what runs instead
    packed: int  # layers whose weights are packed, in all models that exist
    unknown: dict[str, tuple[str, ...]]  # by model: classes that compute something else and stay unchanged
    running: int  # layers whose delta rule ran on torch_gdn since enable(), outside compiled graphs; 0 while disabled
    tested: tuple[str, ...]  # versions of transformers
    off: dict[str, str]  # by model or feature: why it is off with this version
    drafts: dict[str, str]  # by model and device: what `enable(drafts="auto")` found, and chose

    @cached_property
    def layers(self) -> int:
        """Counts Gated DeltaNet and Kimi Delta Attention layers of all models that exist when you first read this."""
        return sum(1 for _ in delta_layers())

    def __str__(self) -> str:
        return "\n".join([self._first_line(), *self._problems()])

    def details(self) -> str:
        """Returns the text, with a line for each replaced name, each class left alone, and each count."""
        lines = [self._first_line()]
        lines += [f"tested with transformers {versions.tested()}"]
        lines += [f"torch_gdn is {'enabled' if self.enabled else 'disabled'} for transformers {self.transformers}"]
        lines += [f"{model}: {', '.join(names)}" for model, names in self.replaced.items()]
        lines += [f"{model}: {', '.join(names)}: left to transformers" for model, names in self.unknown.items()]
        lines += [f"{function}: {calls} calls ran on torch_gdn" for function, calls in self.ran.items()]
        return "\n".join([*lines, *self._problems()])

    def _first_line(self) -> str:
        if not self.layers:
            state = "enabled" if self.enabled else "disabled"
            return f"torch_gdn is {state}, and no model with Gated DeltaNet layers exists"
        layers = f"{self.layers} Gated DeltaNet layers"
        if not self.enabled:
            return f"torch_gdn is disabled, and {layers} run on transformers' own code: call torch_gdn.enable()"
        calls = sum(sum(reasons.values()) for reasons in self.fallbacks.values())
        if not (calls or self.running):
            return f"torch_gdn is enabled, and none of {layers} has run since, except in compiled graphs"
        return f"{self.running} of {layers} ran on torch_gdn; {calls} calls went to transformers"

    def _problems(self) -> list[str]:
        """Lists problems, and the number of packed layers."""
        lines = [
            f"{function}: {calls} calls went to transformers: {reason}"
            for function, reasons in self.fallbacks.items()
            for reason, calls in reasons.items()
        ]
        lines += [f"{self.packed} layers with packed weights"] * bool(self.packed)
        if not versions.is_tested(self.transformers):
            lines += [f"transformers {self.transformers} is not tested with torch_gdn; {versions.tested()} are"]
        lines += [f"{name} is off: {reason}" for name, reason in self.off.items()]
        lines += [f"drafts for {name}: {choice}" for name, choice in self.drafts.items()]
        return lines + [f"{op} failed the self-test: {reason}" for op, reason in self.wrong.items()]


def enable(
    *,
    continuous_batching: bool = False,
    rollback: bool = False,
    drafts: int | Literal["auto"] | None = None,
    **unknown: NoReturn,
) -> Status:
    """Makes transformers' Gated DeltaNet models call torch_gdn, including those already built.

    On `mps`, the experts of every mixture of experts do too, and models in quantised files are loaded with packed
    weights. A model whose weights exceed what Metal recommends raises torch.OutOfMemoryError before they are read.
    Enabling twice is enabling once. Called while a model runs in another thread, it takes effect between two
    functions.

    On an mps device, each kernel is tested when a model first launches it, once per machine. A kernel that fails is
    replaced, with a warning: see `torch_gdn.self_test`.

    On a version of transformers that nobody tested (`status().tested`) it also compares, once, small random models with
    and without its code on the CPU. A model that differs is left to transformers, with a warning.

    Args:
        continuous_batching: `generate_batch` and the manager behind it take these models too, their states in a pool.
            For transformers 5.23 and 5.24; with another version there is a warning, and the models are enabled without
            it. Default: False.
        rollback: assisted generation (prompt lookup, a draft model) takes these models too. For the same versions.
            Default: False.
        drafts: how many tokens a model's prediction layer drafts in each step of `generate` for one text, 1 to 16;
            "auto" drafts one, as long as that is faster. With drafts, `rollback` is on. None leaves it to
            `use_mtp=True`. For the same versions. Default: None.

    Returns:
        status: What `status()` returns.

    Raises:
        ImportError: If transformers is not installed, or its version has none of the models.
        ValueError: If `drafts` is something else, or the environment variable TORCH_GDN_SELF_TEST is not auto, again or
            off.

    Example:
        >>> from torch_gdn.integrations import transformers
        >>> transformers.enable().enabled
        True
        >>> transformers.disable().enabled
        False
    """
    for name in unknown:
        raise TypeError(f"enable: {name}: expected continuous_batching, rollback or drafts, got another option")
    if drafts not in (None, "auto") and (type(drafts) is not int or not 1 <= drafts <= MOST_DRAFTS):
        raise ValueError(f'enable: drafts: expected "auto", None or 1 to {MOST_DRAFTS}, got {drafts!r}')
    self_test.mode()
    version = transformers_version()
    features = {
        "continuous batching": continuous_batching,
        "rollback": rollback or drafts is not None,
        "drafts": drafts is not None,
    }
    with lock:
        if not applied:
            enable_models(version)
        for feature, wanted in features.items():
            if wanted and feature not in applied:
                enable_feature(feature, version)
        if drafts is not None and "drafts" in applied:
            module_of("drafts").wanted["drafts"] = drafts
        self_test.load()
        return status()


def enable_models(version: str) -> None:
    learn_shared()
    modules = modules_of(MODELS)
    if not modules:
        raise ImportError(f"enable: expected a transformers that has one of {', '.join(MODELS)}, got {version}")
    result = {model: list(patches_of(module)) for model, module in modules.items()}
    for model, patches in result.items():
        if not any("gated_delta_rule" in patch.name for patch in patches):
            warnings.warn(f"transformers {version} has another name for the delta rule of {model}", stacklevel=3)
    result |= {model: list(kda_patches(module)) for model, module in modules_of(KDA_MODELS).items()}
    others = {model: list(convolution_patches(module)) for model, module in modules_of(CONVOLVING_MODELS).items()}
    result |= {model: patches for model, patches in others.items() if patches}
    features = {
        "experts": experts_patches(),
        "GGUF": gguf_patches(),
        "quantised weights": packed_patches(),
        "memory": memory_patches(),
    }
    result |= {name: listed for name, patches in features.items() if (listed := list(patches))}
    if not versions.is_tested(version):
        result, differing = comparison.agreeing(result, version)
        left_models.update(differing)
    dispatch.reset_counts()
    apply(result)


def enable_feature(feature: str, version: str) -> None:
    if reason := versions.why_not_served(version):
        warnings.warn(f"torch_gdn's {feature} {reason}: not enabled", stacklevel=3)
        return
    name, patches = FEATURES[feature]
    result = getattr(module_of(name), patches)
    modules = modules_of(SERVED_MODELS if feature == "continuous batching" else DRAFTED_MODELS)
    apply({feature: list(result(modules))})


def rolls_back(model: object) -> bool:
    """Returns whether assisted generation of this model takes its states back, and continues from a filled cache."""
    return "rollback" in applied and isinstance(model, known_forms.models_of(modules_of(DRAFTED_MODELS)))


def module_of(name: str) -> ModuleType:
    """Returns a module of this package that needs a version of transformers that features know."""
    return importlib.import_module(f"torch_gdn.integrations.transformers.{name}")


def modules_of(models: tuple[str, ...]) -> dict[str, ModuleType]:
    """Returns the modules of the models that this version of transformers has."""
    return {model: module for model in models if (module := modeling_module(model)) is not None}


def apply(patches: dict[str, list[Patch]]) -> None:
    applied.update(patches)
    dispatch.enabled = True
    for patch in (patch for own in patches.values() for patch in own):
        patch.apply()


def disable() -> Status:
    """Restores everything that `enable()` changed. Disabling twice is disabling once.

    Returns:
        status: What `status()` returns. The counts stay until the next `enable()`.
    """
    with lock:
        for result in reversed(applied.values()):  # because features may wrap each other
            for patch in reversed(result):
                if not patch.revert():
                    warnings.warn(
                        f"torch_gdn does not restore {patch}: something else replaced it in the meantime", stacklevel=2
                    )
        if "drafts" in applied:
            module_of("drafts").wanted.clear()
        applied.clear()
        dispatch.enabled = False
        left_models.clear()
        return status()


def status() -> Status:
    """Returns how many layers of your models ran on torch_gdn, and which calls went to transformers and why.

    Returns:
        status: A `Status`. `print(status)` is short; `print(status.details())` also lists what is replaced, and counts
            the calls of each function.

    Raises:
        ImportError: If transformers is not installed.
    """
    reasons: dict[str, dict[str, int]] = {}
    for (function, reason), calls in dispatch.fallbacks.items():
        reasons.setdefault(function, {})[reason] = calls
    return Status(
        enabled=bool(applied),
        transformers=transformers_version(),
        replaced={model: tuple(map(str, result)) for model, result in applied.items()},
        ran=dict(dispatch.ran),
        fallbacks=reasons,
        wrong=dict(self_test.replaced),
        packed=layers_packed(),
        unknown=unknown_classes(),
        running=len(dispatch.layers) if applied else 0,
        tested=versions.TESTED,
        off=off_features(),
        drafts={f"{model} on {device}": str(choice) for (model, device), choice in draft_choice.choices.items()},
    )


def off_features() -> dict[str, str]:
    """Returns the models and features that are off because of transformers' version, and why."""
    if reason := versions.why_not_served(transformers_version()):
        return dict.fromkeys((*FEATURES, "packed weights"), reason) | left_models
    return dict(left_models)


def delta_layers() -> Iterator[tuple[str, Module]]:
    """Yields the layers of all existing models, with the name of their model. The garbage collector knows even those
    built before `enable()`, unless `gc.freeze()` hid them. This visits every object, which takes a tenth of a second.
    """
    models = {kind: model_of(kind) for kind in subclasses(Module) if kind.__name__.endswith(DELTA_LAYERS)}
    for each in gc.get_objects():
        if model := models.get(type(each)):
            yield model, each


def subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def model_of(kind: type) -> str:
    """Returns the name of the transformers model that defines a layer's class, or ""."""
    package, _, rest = kind.__module__.partition(".models.")
    return rest.partition(".")[0] if package == "transformers" else ""


def unknown_classes() -> dict[str, tuple[str, ...]]:
    modules = {model: module for model, module in modules_of(MODELS).items() if model in applied}
    result = {model: unknown_to(module, applied[model]) for model, module in modules.items()}
    return {model: names for model, names in result.items() if names}


def supports(function: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Returns whether torch_gdn takes this call of a transformers model, and if not, why.

    Args:
        function: "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda",
            "fused_recurrent_kda", "causal_conv1d_fn" or "causal_conv1d_update"; "short_convolution", which OLMo-Hybrid
            has until 5.12, "rms_norm", "rms_norm_gated", "experts", "moe_block", "mlp", "attention" and
            "decoder_layer": these are a layer's forward, and its first argument is the layer; "rotation", of q and k by
            cos and sin; "gdn_decode", whose arguments are the layer, its input and both states.
        args, kwargs: the arguments of the model's call.

    Returns:
        supported: (True, "") or (False, the reason).

    Raises:
        ValueError: If the function is not one of these.
        TypeError: If an argument is unknown or missing.

    Example:
        >>> import torch
        >>> from torch_gdn.integrations.transformers import supports
        >>> q, g = torch.zeros(1, 8, 2, 64), torch.zeros(1, 8, 2)
        >>> supports("chunk_gated_delta_rule", q, q, q, g=g, beta=g)
        (True, '')
        >>> supports("chunk_gated_delta_rule", q, q, q, g=g, beta=g, chunk_size=100)
        (False, 'chunk_size: expected 16, 32 or 64, got 100')
    """
    if function not in dispatch.FUNCTIONS:
        raise ValueError(f"supports: function: expected one of {', '.join(dispatch.FUNCTIONS)}, got {function!r}")
    reason_of, names = dispatch.FUNCTIONS[function].reason, dispatch.FUNCTIONS[function].names
    kwargs = {names.get(name, name): value for name, value in kwargs.items()}
    try:
        inspect.signature(reason_of).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"supports: arguments of {function}: {error}") from None
    if args and isinstance(args[0], Module) and not dispatch.enabled:
        learn(sys.modules[type(args[0]).__module__])  # as enable() does
    reason = dispatch.reason_for(reason_of, args, kwargs)
    return not reason, reason


def transformers_version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "torch_gdn.integrations.transformers: expected transformers to be installed: "
            f"pip install '{versions.BOUNDS}'"
        ) from None
