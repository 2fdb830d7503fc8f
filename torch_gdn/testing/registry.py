"""The entry of an op: what a test, a check, a proof or a benchmark needs to know about it.

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

from torch_gdn._recorder import KernelVariant, Launch, recording
from torch_gdn.testing import bounds
from torch_gdn.testing.inputs import Call, bytes_of, doubled, empty_on, to_device
from torch_gdn.testing.models import METAL_TYPES

Named = dict[str, Tensor]
Change = Callable[[Call], Call]
MPS = torch.device("mps")


@dataclass(frozen=True)
class Point:
    """What chooses a kernel variant of a family's ops."""

    dtype: torch.dtype = torch.float32
    packed: bool = False  # sequences in a batch of one, by cu_seqlens
    algorithm: str | None = None  # of a prefill; None: by the heuristic

    @property
    def name(self) -> str:
        """The dtype, then what differs from the defaults."""
        words = [METAL_TYPES[self.dtype]]
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default:
                words.append(f"{each.name} {METAL_TYPES.get(value, value)}" if value is not True else each.name)
        return ", ".join(words)

    def context(self) -> AbstractContextManager[None]:
        """Settings that are no arguments, in force while the op is called."""
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
    by_contents: bool = False  # found from what a tensor holds, so not on fake tensors


@dataclass(frozen=True)
class Hostile:
    """Integers in the device's memory, in place of the small call's, that kernels must report and survive."""

    argument: str
    values: Sequence[Any]
    packed: bool = False
    algorithms: tuple[str | None, ...] = (None,)  # of a prefill


@dataclass(frozen=True)
class OpEntry(Generic[P]):
    """One op. Fields that an op leaves out have the meaning of their defaults."""

    name: str
    draw: Callable[[P], Call]  # keyword arguments of the op, on the CPU, by torch's generator
    exact: Callable[[Call], Any]  # the outputs of float64 inputs, and in the call what it writes
    small: P  # the smallest call, from which invalid and hostile ones are made
    points: Sequence[P]  # that are computed and replayed
    quick: Sequence[P] = ()  # of them; none: the first
    compiled: Callable[[], Iterable[P]] = tuple  # further ones, whose kernels are only compiled
    bound: Callable[[P, Call, Named], Mapping[str, float]] = lambda point, call, exact: {}  # else ROUNDING
    heads: Mapping[str, int | None] = field(default_factory=dict)  # dimension of heads of an output, else 2
    result: str = "y"  # the name of a result that the schema does not name
    operations: Callable[[Call], int] = lambda call: 0  # multiplications and additions
    invalid: Callable[[OpEntry[P]], Iterable[Invalid]] = lambda entry: ()
    hostile: Sequence[Hostile] = ()

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.gdn, self.name).default

    @property
    def arguments(self) -> list[str]:
        return [each.name for each in self.overload._schema.arguments]

    @property
    def written(self) -> list[str]:
        """Arguments that the op writes."""
        schema = self.overload._schema.arguments
        return [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]

    @property
    def first(self) -> str:
        return next(iter(self.call(self.small)))

    @property
    def packable(self) -> bool:
        return "cu_seqlens" in self.arguments and "seq_lens" not in self.arguments

    def smallest(self, packed: bool = False, device: torch.device | str = "cpu", **changes: Any) -> Call:
        return to_device(self.call(replace(self.small, packed=packed, **changes)), device)

    def call(self, point: P, seed: int = 0) -> Call:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.draw(point)

    def run(self, call: Call, point: Point | None = None) -> Any:
        with nullcontext() if point is None else point.context():
            return self.overload(**call)

    def outputs(self, call: Call, results: Any) -> Named:
        """By name what the op returned and what it wrote, without what was not asked for."""
        returns = self.overload._schema.returns
        found = results if isinstance(results, tuple | list) else (results,)
        names = [each.name or self.result for each in returns]
        named = dict(zip(names, found, strict=False)) | {name: call.get(name) for name in self.written}
        return {name: x for name, x in named.items() if x is not None and x.numel()}

    def exact_outputs(self, call: Call) -> Named:
        """The same in float64, from the very numbers of a call on the CPU."""
        wide = {name: x.clone() if isinstance(x, Tensor) and name in self.written else x for name, x in call.items()}
        wide = {name: doubled(x) for name, x in wide.items()}
        return self.outputs(wide, self.exact(wide))

    def compared(self, point: P, call: Call, found: Named) -> list[bounds.Part]:
        """The outputs of a call, whose inputs are on the CPU as they were drawn, and their bounds."""
        exact = self.exact_outputs(call)
        if exact.keys() != found.keys():
            raise AssertionError(f"{self.name}: outputs {sorted(found)}, expected {sorted(exact)}")
        allowed = self.bound(point, call, exact)
        parts = []
        for name, x in found.items():
            bound = allowed.get(name, bounds.ROUNDING.get(x.dtype, 0.0))
            if not x.is_floating_point():
                parts.append(bounds.differing(name, x, exact[name], bound))
                continue
            head_dim = self.heads.get(name, 2 if x.dim() > 2 else None)
            parts += bounds.compare(name, x, exact[name], bound, head_dim)
        return parts

    def bytes(self, call: Call) -> int:
        """That any implementation moves: inputs once, outputs once; what is written in place is read too."""
        fake = self.overload(**empty_on(call, "meta"))
        results = fake if isinstance(fake, tuple | list) else (fake,)
        return bytes_of(*call.values(), *results, *(call.get(name) for name in self.written))


REGISTRY: dict[str, OpEntry[Any]] = {}


def register(*entries: OpEntry[Any]) -> None:
    REGISTRY.update({entry.name: entry for entry in entries})


def complete() -> set[str]:
    """The names of all ops that have an entry."""
    return set(REGISTRY)


def computed(quick: bool) -> Iterator[tuple[OpEntry[Any], Point]]:
    """Every op at the points where it is compared with float64."""
    for entry in REGISTRY.values():
        points = (entry.quick or entry.points[:1]) if quick else [*entry.quick, *entry.points]
        yield from ((entry, point) for point in dict.fromkeys(points))


def compiled() -> Iterator[tuple[OpEntry[Any], Point]]:
    """Every op at the further points, whose kernels are only compiled."""
    yield from ((entry, point) for entry in REGISTRY.values() for point in entry.compiled())


def launches_at(entry: OpEntry[Any], point: Point, memory: AbstractContextManager[Any] | None = None) -> list[Launch]:
    """What the op launches there, recorded with tensors that hold nothing; `memory`: a fake_mps, to take none."""
    call = entry.call(point)
    with memory or nullcontext(), recording() as recorded:
        entry.run(empty_on(call, MPS), point)
    return recorded.launches


def first_of_each_variant(launches: Iterable[Launch]) -> list[Launch]:
    """With what overlaps in any launch of the variant."""
    first: dict[KernelVariant, Launch] = {}
    for launch in launches:
        known = first.setdefault(launch.variant, launch)
        if not set(launch.overlaps) <= set(known.overlaps):
            overlaps = tuple(sorted({*known.overlaps, *launch.overlaps}))
            first[launch.variant] = replace(known, overlaps=overlaps)
    return list(first.values())


def accepted_by(function: Callable[..., Any], call: Call) -> Call:
    """Without the arguments that a reference leaves out, since they change no number."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in call.items() if name in known}
