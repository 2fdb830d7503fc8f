"""An op's entry: everything that a test, a check, a proof or a benchmark needs to know about the op.

Nothing else lists ops. `REGISTRY` has the entry of each; a test compares its names with `_C.ops()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn._recorder import KernelVariant, Launch, recording
from torch_gdn_check.registry import bounds
from torch_gdn_check.registry.drawing import drawing
from torch_gdn_check.registry.inputs import Call, bytes_of, doubled, empty_on, to_device
from torch_gdn_check.registry.models import METAL_TYPES
from torch_gdn_check.registry.on_the_cpu import on_the_cpu

Named = dict[str, Tensor]
Change = Callable[[Call], Call]
MPS = torch.device("mps")


@dataclass(frozen=True)
class Point:
    """The dimensions and options that choose a kernel variant; each family adds its own."""

    dtype: torch.dtype = torch.float32
    packed: bool = False  # several sequences in a batch of one, separated by cu_seqlens
    algorithm: str | None = None  # prefill algorithm; None leaves the choice to the heuristic

    @property
    def name(self) -> str:
        """The dtype, followed by each field that differs from its default."""
        words = [METAL_TYPES[self.dtype]]
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default:
                words.append(f"{each.name} {METAL_TYPES.get(value, value)}" if value is not True else each.name)
        return ", ".join(words)

    def context(self) -> AbstractContextManager[None]:
        """Applies settings that are not arguments of the op, such as a pinned algorithm, while the op runs."""
        return nullcontext()


P = TypeVar("P", bound=Point)


@dataclass(frozen=True)
class Invalid:
    """A change of the small call that the op refuses, with an error that names the argument."""

    argument: str
    error: type[Exception]
    what: str
    change: Change
    packed: bool = False
    by_contents: bool = False  # the check reads tensor values, so fake tensors pass it


@dataclass(frozen=True)
class Hostile:
    """Out-of-range integers in device memory, in place of the small call's. Kernels must report and survive them."""

    argument: str
    values: Sequence[Any]
    packed: bool = False
    algorithms: tuple[str | None, ...] = (None,)  # prefill algorithms to try


@dataclass(frozen=True)
class OpEntry(Generic[P]):
    """Everything known about one op. A field that an op does not set keeps its default."""

    name: str
    draw: Callable[[P], Call]  # draws keyword arguments on the CPU, inside `drawing`
    small: P  # the smallest call; invalid and hostile calls are changes of it
    points: Sequence[P]  # computed by the check and replayed by evidence.lab.cuda
    # Returns the outputs for float64 inputs and updates what the op writes. The default is the reference of the op's
    # name, which may lack the underscore, in float64.
    exact: Callable[[Call], Any] | None = None
    quick: Sequence[P] = ()  # computed by the quick check; the first point if empty
    compiled: Callable[[], Iterable[P]] = tuple  # more points; their kernels are only compiled
    bound: Callable[[P, Call, Named], Mapping[str, float]] = lambda point, call, exact: {}  # the default is ROUNDING
    heads: Mapping[str, int | None] = field(
        default_factory=dict
    )  # which dimension of an output holds the heads; default 2
    result: str = "y"  # name of the result if the schema gives none
    operations: Callable[[Call], int] = lambda call: 0  # float operations; 0 if unknown
    exponentials: int = 0  # number for each element of the first output
    launches: int | None = 1  # for the small call and for views of it; None if the op refuses or copies views
    scratch: bool = False  # True if it allocates more than its outputs
    # By argument, how a tensor of the small call may differ; other differences are refused. "float": another dtype of
    # 16 or 32 bits; "float64": any; "rank": another number of dimensions; "more": of them; the number of a dimension:
    # it may be shorter or empty; "1-": it may be shorter.
    takes: Mapping[str, str] = field(default_factory=dict)
    invalid: Callable[[OpEntry[P]], Iterable[Invalid]] = lambda entry: ()  # other calls that it refuses
    hostile: Sequence[Hostile] = ()

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.gdn, self.name).default

    @property
    def arguments(self) -> list[str]:
        return [each.name for each in self.overload._schema.arguments]

    @property
    def written(self) -> list[str]:
        """Returns the arguments that the op writes."""
        schema = self.overload._schema.arguments
        return [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]

    @property
    def first(self) -> str:
        return next(iter(self.call(self.small)))

    @property
    def packable(self) -> bool:
        return "cu_seqlens" in self.arguments and "block_table" not in self.arguments

    def smallest(self, packed: bool = False, device: torch.device | str = "cpu", **changes: Any) -> Call:
        return to_device(self.call(replace(self.small, packed=packed, **changes)), device)

    def call(self, point: P, seed: int = 0) -> Call:
        with torch.device("cpu"), drawing(seed):
            return self.draw(point)

    def run(self, call: Call, point: Point | None = None) -> Any:
        with nullcontext() if point is None else point.context():
            return self.overload(**call)

    def outputs(self, call: Call, results: Any) -> Named:
        """Returns what the op returned and wrote, by name. Omits empty tensors: nobody requested those results."""
        returns = self.overload._schema.returns
        result = results if isinstance(results, tuple | list) else (results,)
        names = [each.name or self.result for each in returns]
        named = dict(zip(names, result, strict=False)) | {name: call.get(name) for name in self.written}
        return {name: x for name, x in named.items() if x is not None and x.numel()}

    def exact_outputs(self, call: Call) -> Named:
        """Returns the same in float64, computed from the inputs of a call on the CPU."""
        wide = {name: x.clone() if isinstance(x, Tensor) and name in self.written else x for name, x in call.items()}
        wide = {name: doubled(x) for name, x in wide.items()}
        with on_the_cpu():
            return self.outputs(wide, self.exact(wide) if self.exact else self._reference(wide))

    def _reference(self, wide: Call) -> Any:
        known = vars(reference)
        function = known.get(self.name) or known[self.name.removesuffix("_")]
        return function(**wide | ({"dtype": torch.float64} if "dtype" in wide else {}))

    def compared(self, point: P, call: Call, outputs: Named, exact: Named | None = None) -> list[bounds.Part]:
        """Compares the outputs of a call with the exact ones. The inputs of `call` must be as drawn, on the CPU.

        `exact` is what exact_outputs() returned for the call; by default it is called.
        """
        exact = self.exact_outputs(call) if exact is None else exact
        if exact.keys() != outputs.keys():
            raise AssertionError(f"{self.name}: outputs {sorted(outputs)}, expected {sorted(exact)}")
        allowed = self.bound(point, call, exact)
        parts = []
        for name, x in outputs.items():
            bound = allowed.get(name, bounds.ROUNDING.get(x.dtype, 0.0))
            if not x.is_floating_point():
                parts.append(bounds.differing(name, x, exact[name], bound))
                continue
            head_dim = self.heads.get(name, 2 if x.dim() > 2 else None)
            parts += bounds.compare(name, x, exact[name], bound, head_dim)
        return parts

    def bytes(self, call: Call) -> int:
        """Returns the bytes that any implementation must move: inputs and outputs once, written arguments twice."""
        fake = self.overload(**empty_on(call, "meta"))
        results = fake if isinstance(fake, tuple | list) else (fake,)
        return bytes_of(*call.values(), *results, *(call.get(name) for name in self.written))


REGISTRY: dict[str, OpEntry[Any]] = {}


def register(*entries: OpEntry[Any]) -> None:
    REGISTRY.update({entry.name: entry for entry in entries})


def complete() -> set[str]:
    """Returns the names of all registered ops."""
    return set(REGISTRY)


def computed(quick: bool) -> Iterator[tuple[OpEntry[Any], Point]]:
    """Yields every op with each point at which it is compared with float64."""
    for entry in REGISTRY.values():
        points = (entry.quick or entry.points[:1]) if quick else [*entry.quick, *entry.points]
        yield from ((entry, point) for point in dict.fromkeys(points))


def compiled() -> Iterator[tuple[OpEntry[Any], Point]]:
    """Yields every op with each point whose kernels are only compiled."""
    yield from ((entry, point) for entry in REGISTRY.values() for point in entry.compiled())


def launches_at(entry: OpEntry[Any], point: Point, memory: AbstractContextManager[Any] | None = None) -> list[Launch]:
    """Records the op's launches at a point, on uninitialised tensors. A fake_mps as `memory` allocates none."""
    call = entry.call(point)
    with memory or nullcontext(), recording() as recorded:
        entry.run(empty_on(call, MPS), point)
    return recorded.launches


def first_of_each_variant(launches: Iterable[Launch]) -> list[Launch]:
    """Returns one launch per kernel variant. Its `overlaps` are those of all launches of the variant."""
    first: dict[KernelVariant, Launch] = {}
    for launch in launches:
        known = first.setdefault(launch.variant, launch)
        if not set(launch.overlaps) <= set(known.overlaps):
            overlaps = tuple(sorted({*known.overlaps, *launch.overlaps}))
            first[launch.variant] = replace(known, overlaps=overlaps)
    return list(first.values())


def accepted_by(function: Callable[..., Any], call: Call) -> Call:
    """Drops arguments that a reference does not have because they do not change the result."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in call.items() if name in known}
