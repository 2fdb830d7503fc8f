"""Counts a model's work on `mps` by layer and part: launches, copies between host and device, waits and bytes.

A launch is an operator of PyTorch that computes or copies on the device, or a kernel of torch_gdn. An operator of
PyTorch counts as one launch, although a Mac may run several kernels for it. Views, allocations and casts that change
nothing are free. torch_gdn's kernels are recorded and do not run, so that real sizes of heads take no time; results
then mean nothing. An engine needs results, so there they run too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_gdn import recording
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

ATTENTION = torch.nn.functional.scaled_dot_product_attention
COPIES = ("copy_", "_to_copy", "to")  # free if nothing changes
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2")  # the host reads
FACTORIES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # these only allocate
ONCE, RESIDUALS = "once", "norms and residuals"
# The parts of a layer, by the end of the class's name. A layer computes the residuals itself.
PARTS = {
    "GatedDeltaNet": "gated delta net",
    "ShortConvolution": "gated delta net",
    "Attention": "attention",
    "SparseMoeBlock": "experts",
    "MLP": "mlp",
}


class Place(NamedTuple):
    layer: int | None  # None outside all layers
    part: str


@dataclass
class Counts:
    launches: Counter[str] = field(default_factory=Counter)  # by operator or kernel
    copies: Counter[str] = field(default_factory=Counter)  # "to the device" and "to the host"
    waits: Counter[str] = field(default_factory=Counter)  # by operator
    bytes: int = 0  # read and written by launches, without parameters and states

    @property
    def total(self) -> int:
        return sum(self.launches.values())


class LaunchCounter(TorchDispatchMode):
    """Puts every operator's counts where `place` is. Use it through `counting`.

    Attributes:
        counts: by place.
        place: where the next operator is.
        excluded: addresses of storages whose bytes do not count.
        runs: whether torch_gdn's kernels run.
    """

    def __init__(self, runs: bool = False) -> None:
        super().__init__()
        self.runs = runs
        self.counts: dict[Place, Counts] = {}
        self.place = Place(None, ONCE)
        self.excluded: set[int] = set()
        self.is_inside = False  # inside an operator that counts as one launch

    def here(self) -> Counts:
        return self.counts.setdefault(self.place, Counts())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "gdn":
            return self.record(func, args, kwargs)
        result = func(*args, **kwargs)
        if not self.is_inside:
            self.count(func, args, kwargs, list(tensors(result)))
        return result

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        with recording() as recorded:
            result = func(*args, **kwargs)
        counts = self.here()
        counts.launches.update(launch.variant.kernel for launch in recorded.launches)
        counts.bytes += self.bytes_of([*tensors((args, kwargs)), *tensors(result)])
        return func(*args, **kwargs) if self.runs else result

    def count(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        name, given = func.overloadpacket.__name__, list(tensors((args, kwargs)))
        devices = {x.device.type for x in (*given, *results)}
        if "mps" not in devices or name in FACTORIES:
            return
        counts = self.here()
        if name in WAITS:
            counts.waits[name] += 1
        if "cpu" in devices and name in COPIES:
            source = given[-1] if name == "copy_" else given[0]
            counts.copies["to the device" if source.device.type == "cpu" else "to the host"] += 1
            is_waited_for = source.device.type == "mps" and not (kwargs.get("non_blocking") or args[2:3] == (True,))
            counts.waits.update([name] * is_waited_for)
        elif name != "_local_scalar_dense" and not is_view(func, given, results) and any(x.numel() for x in results):
            counts.launches[name] += 1
            counts.bytes += self.bytes_of([*given, *results])

    def bytes_of(self, used: Iterable[Tensor]) -> int:
        each = {(x.data_ptr(), x.numel()): x for x in used if x.device.type == "mps"}
        return sum(x.numel() * x.itemsize for x in each.values() if x.untyped_storage().data_ptr() not in self.excluded)


class AttentionAsOne(TorchFunctionMode):
    """Counts `scaled_dot_product_attention` as one launch, as on a Mac. Elsewhere it is several operators."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not ATTENTION:
            return func(*args, **kwargs)
        self.counter.is_inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.counter.is_inside = False
        counts = self.counter.here()
        counts.launches["scaled_dot_product_attention"] += 1
        counts.bytes += self.counter.bytes_of([*tensors((args, kwargs)), result])
        return result


def tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))


def is_view(func: Any, given: list[Tensor], results: list[Tensor]) -> bool:
    """Returns whether nothing is written and every result is memory of an argument."""
    if func._schema.is_mutable:
        return False
    storages = {x.untyped_storage().data_ptr() for x in given}
    return all(x.untyped_storage().data_ptr() in storages for x in results)


@contextmanager
def counting(
    model: nn.Module, starts: Callable[[], None] = lambda: None, runs: bool = False
) -> Iterator[LaunchCounter]:
    """Counts each operator inside, by the part of the model. Calls `starts` when a forward of the model starts."""
    counter = LaunchCounter(runs)
    weights = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}

    def start(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        starts()
        counter.excluded = weights | states_of(kwargs.get(CACHE_NAMES.model))

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(start, with_kwargs=True).remove)
        hooks.enter_context(tracking_place(dict(places(model)), counter))
        hooks.enter_context(AttentionAsOne(counter))
        hooks.enter_context(counter)
        yield counter


def places(model: nn.Module) -> Iterator[tuple[nn.Module, Place]]:
    """Yields the layers and their parts. Norms belong to their layer."""
    layers = next(x for name, x in model.named_modules() if name.endswith("layers"))
    for index, layer in enumerate(layers.children()):
        yield layer, Place(index, RESIDUALS)
        for child in layer.children():
            if ending := next((x for x in PARTS if type(child).__name__.endswith(x)), None):
                yield child, Place(index, PARTS[ending])


@contextmanager
def tracking_place(places: dict[nn.Module, Place], counter: LaunchCounter) -> Iterator[None]:
    """Tells the counter which part runs. No hook does, because enable() replaces nothing that a hook must see."""
    call: Any = nn.Module._call_impl

    def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in places:
            return call(module, *args, **kwargs)
        before, counter.place = counter.place, places[module]
        try:
            return call(module, *args, **kwargs)
        finally:
            counter.place = before

    setattr(nn.Module, "_call_impl", enter)  # noqa: B010, because mypy forbids assigning to a method
    try:
        yield
    finally:
        setattr(nn.Module, "_call_impl", call)  # noqa: B010


def states_of(cache: Any) -> set[int]:
    """Returns the addresses of the tensors that the cache holds in its layers."""
    held = [vars(layer) for layer in getattr(cache, "layers", ())]
    return {x.untyped_storage().data_ptr() for x in tensors(held) if x.device.type == "mps"}
