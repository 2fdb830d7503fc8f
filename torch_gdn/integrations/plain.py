"""Decides whether torch_gdn may compute a module's result without calling the module.

A path that does the work of several modules in one launch would ignore whatever a user changed in them: a subclass, a
hook, a wrapper, a parametrisation, a quantised weight. This module is the one place that looks for such changes. Names
and attributes prove nothing, so it compares classes and functions by identity with those that were learnt while
torch_gdn was being enabled.
"""

import functools
from collections.abc import Callable, Container
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as hooks

T = TypeVar("T")
CALL = nn.Module.__call__
GLOBAL_HOOKS = (  # torch changes these dictionaries in place
    hooks._global_forward_hooks,
    hooks._global_forward_pre_hooks,
    hooks._global_backward_hooks,
    hooks._global_backward_pre_hooks,
)
DENSE = (Tensor, nn.Parameter)
UNRELATED = ("extra_repr", "reset_parameters")  # functions on which no result depends


class Known(NamedTuple):
    """What a class was when torch_gdn learnt that it can do the class's work."""

    forwards: tuple[Any, ...]  # the class's own, and torch_gdn's replacement
    helpers: tuple[tuple[str, Any], ...]  # its other functions
    shadows: frozenset[str]  # their names, which an instance may not have as its own attributes


known: dict[type, Known] = {}


def learn(owner: type, replacement: Any = None) -> None:
    """Records a class's functions. `replacement` is the forward that torch_gdn is about to give it."""
    before = known.get(owner)
    if replacement is None and before is not None and owner.forward in before.forwards:  # type: ignore[attr-defined]
        return
    functions = functions_of(owner)
    forward = functions.pop("forward", owner.forward)  # type: ignore[attr-defined]
    known[owner] = Known((forward, replacement), tuple(functions.items()), frozenset(functions))


def functions_of(owner: type) -> dict[str, Any]:
    """Returns the functions on which a result may depend. Its forward is the one that torch_gdn did not replace."""
    names = {
        name
        for base in owner.__mro__
        if base not in nn.Module.__mro__
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and name[:2] != "__" and name not in UNRELATED
    }
    result = {name: getattr(owner, name) for name in sorted(names)}
    before = known.get(owner)
    if before is not None and result.get("forward") is before.forwards[1]:
        result["forward"] = before.forwards[0]
    return result


def once_per_code(find: Callable[..., T]) -> Callable[..., T]:
    """Keeps what `find` returns for classes until one of them gets another function."""
    results: dict[tuple[Any, ...], T] = {}

    @functools.wraps(find)
    def ask(*owners: type) -> T:
        key = tuple((owner, *functions_of(owner).values()) for owner in owners)
        if key not in results:
            results[key] = find(*owners)
        return results[key]

    return ask


def change_of(module: Any, owners: Container[type]) -> str:
    """Returns what forbids a path to do a module's work without calling the module, or "".

    `owners` are the classes whose work the path does.
    """
    kind = type(module)
    recorded = known.get(kind)
    if recorded is None or kind not in owners:
        return f"torch_gdn does not know {kind.__name__} at this place"
    if kind.forward not in recorded.forwards or kind.__call__ is not CALL:
        return f"{kind.__name__} was given another forward"
    own = vars(module)
    if "forward" in own or "_compiled_call_impl" in own:
        return f"a {kind.__name__} has its own forward"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return f"a hook of {kind.__name__} must be called"
    if any(GLOBAL_HOOKS):
        return f"a global hook must be called for {kind.__name__}"
    return change_of_itself(module, kind)


def change_of_itself(module: Any, owner: type) -> str:
    """Returns why the module's class's forward is not what torch_gdn put in the place of the owner's, or "".

    Hooks and a forward of the instance are no obstacle here: whoever called the class's forward has called them.
    """
    kind = type(module)
    if kind is not owner:
        return f"{kind.__name__} is not exactly {owner.__name__}"
    recorded = known[owner]
    for name, function in recorded.helpers:
        if getattr(kind, name) is not function:
            return f"{kind.__name__}.{name} was replaced"
    if recorded.shadows and not recorded.shadows.isdisjoint(vars(module)):
        return f"a {kind.__name__} has its own method"
    return ""


def learn_torchs(*owners: type) -> tuple[type, ...]:
    """Learns classes of torch, and returns those whose forward is torch's own."""
    own = [x for x in owners if x.forward.__globals__["__name__"] == x.__module__]  # type: ignore[attr-defined]
    for owner in own:
        learn(owner)
    return tuple(own)


LINEARS = learn_torchs(nn.Linear)
CONVOLUTIONS = learn_torchs(nn.Conv1d)
