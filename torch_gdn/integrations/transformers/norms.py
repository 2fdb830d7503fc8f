"""Runs each RMS norm of transformers' models in one launch on mps, instead of 6 to 11 operators.

Models multiply by the weight or by 1 + weight, and round in different places. A class is taken if it computes what one
of the known forms does. enable() tries this on a few rows.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers import functions, known_forms
from torch_gdn.integrations.transformers.functions import Function, common_reason
from torch_gdn.integrations.transformers.refusal import form, refusal_of


@dataclass(frozen=True)
class Form:
    zero_centered: bool
    round_norm: bool
    keeps_dtype: bool = False  # whether results have the input's dtype if the weight's is wider

    def apply(self, norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        """Returns the norm of x, or that of x + residual and the sum."""
        options = {"zero_centered": self.zero_centered, "round_norm": self.round_norm}
        return torch_gdn.rms_norm(x, norm.weight, None, residual, eps_of(norm), residual is not None, **options)


FORMS = (Form(True, False), Form(False, False), Form(False, True))
form_of_class: dict[type, Form] = {}  # of the classes that compute one


def eps_of(norm: Any) -> float:
    """Returns the norm's eps, for which models have two names."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def norm_classes(module: ModuleType) -> Iterator[type]:
    """Yields the classes of a model's module that are RMS norms of a known form."""
    return (owner for owner in known_forms.classes(module, "RMSNorm") if known_form(owner) is not None)


def gated_norm_classes(module: ModuleType) -> Iterator[type]:
    """Yields the classes of a model's module that are gated RMS norms, whatever their constructor's options are."""
    return (owner for owner in known_forms.classes(module, "RMSNormGated") if is_gated(owner))


@plain.once_per_code
def is_gated(owner: Any) -> bool:
    def calls(run: Any) -> Any:
        return run(torch.randn(8, 64), gate=torch.randn(8, 64))

    function = functions.FUNCTIONS["rms_norm_gated"]

    def found_with(**options: Any) -> bool | None:
        return known_forms.has_form(lambda _: owner(64, **options), calls, function)

    return bool(found_with()) and all(found_with(**{name: value}) is not False for name, value in options_of(owner))


def known_form(owner: type) -> Form | None:
    """Tries a class, and remembers it if it has a form."""
    form = tried_form(owner)
    if form is not None:
        form_of_class[owner] = form
    else:
        form_of_class.pop(owner, None)
    return form


def find_form(owner: Callable[..., Any]) -> Form | None:
    """Returns the form whose results the class has in both dtypes, whatever its constructor's options are. On these
    rows no two forms give the same.
    """
    with known_forms.trial():
        try:
            built = [owner(64), *(owner(64, **{name: value}) for name, value in options_of(owner))]
        except TypeError:  # its constructor has other arguments
            return None
        rows, matching, keeps_dtype = torch.randn(8, 64), list(FORMS), True
        for norm in built:
            if getattr(norm, "weight", None) is None or not (hasattr(norm, "eps") or hasattr(norm, "variance_epsilon")):
                return None
            if is_grouped(norm):  # not taken
                continue
            norm.weight.copy_(torch.randn(64))
            for dtype in (torch.float32, torch.bfloat16):
                matching = [form for form in matching if is_same(form, norm.to(dtype), rows.to(dtype))]
            norm.float().weight.copy_(torch.randn(64))  # with more digits than bfloat16 has
            keeps_dtype = keeps_dtype and all(is_same(form, norm, rows.bfloat16()) for form in matching)
    return replace(matching[0], keeps_dtype=keeps_dtype) if len(matching) == 1 else None


tried_form = plain.once_per_code(find_form)


def options_of(owner: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the constructor's options, with other values than their defaults."""
    for name, option in inspect.signature(owner).parameters.items():
        if isinstance(option.default, bool):
            yield name, not option.default
        elif isinstance(option.default, float):
            yield name, option.default + 0.1
        elif option.default is None and option.kind is not option.VAR_KEYWORD:
            yield name, 2


def is_same(form: Form, norm: Any, x: Tensor) -> bool:
    """Allows two roundings in float32. In bfloat16, one value in 100 may be rounded the other way."""
    own, theirs = form.apply(norm, x), norm(x)
    if own.dtype != theirs.dtype:
        return False
    if own.dtype == torch.float32:
        return torch.allclose(own, theirs, rtol=4e-7, atol=1e-6)
    return bool((own != theirs).float().mean() < 0.01)


def form_of(norm: Any) -> Form:
    return form_of_class[type(norm)]


def change_of(norm: Any) -> str:
    """Returns what forbids a path to do the norm's work, or ""."""
    return plain.change_of(norm, form_of_class)


def is_skipped(norm: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether the call silently goes to transformers' own norm.

    Inductor fuses a norm in a compiled graph, and Qwen4-Exp has norms of groups of channels.
    """
    return known_forms.is_skipped(norm, *args, **kwargs) or is_grouped(norm)


def is_grouped(norm: Any) -> bool:
    return getattr(norm, "group_size", None) is not None


def norm_reason(norm: Any, hidden_states: Tensor) -> str:
    weight = norm.weight
    reason = common_reason(hidden_states, weight, differentiable=True)
    if not reason and weight.dtype.itemsize > hidden_states.dtype.itemsize and not form_of(norm).keeps_dtype:
        return f"a {type(norm).__name__} has a weight of {weight.dtype} for {hidden_states.dtype}"
    return reason or refusal_of("rms_norm", x=form(hidden_states, -1), weight=form(weight))


def run_norm(norm: Any, hidden_states: Tensor, /) -> Tensor:
    y: Tensor = form_of(norm).apply(norm, hidden_states)
    return y


FUNCTIONS = {"rms_norm": Function(norm_reason, run_norm, is_skipped)}
