"""Describes what a value depends on, and its value in each lane if that can be told without running the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

# A value may differ between the lanes of a simdgroup, between simdgroups, or be known only when the kernel runs.
LANE, SIMDGROUP, RUN = 1, 2, 4
THREAD = LANE | SIMDGROUP
DIFFERS = THREAD | RUN

# These bits, in the same set, say how large an integer may be. Without the first two, it is no larger than a
# threadgroup's size or a number that is known at compile time.
UNBOUNDED = 8  # as large as its type: read from memory, or counted up to such a value
POSITION = 16  # in the grid; times a constant it is what the host covers, a tensor's dimension, which fits 32 bits
LONG = 32  # has 64 bits and may need them: a product or a difference of pointers
OVERFLOWED = -64  # all higher bits, one per place where a 32-bit integer may have needed more
SIZE = ~DIFFERS

EXACT = 0  # each lane's value, always
SAMPLE = 1  # each lane's value in the first simdgroup and the first round of each loop
OFFSET = 2  # each lane's distance from an unknown value that all lanes share


class NotUnderstood(Exception):
    """Raised if the checks have no rule for something in the program. They must not let it pass."""


Numbers = tuple[int, ...]
ZEROS: Numbers = (0,) * 32


@dataclass(frozen=True)
class Lanes:
    values: Numbers
    kind: int

    @property
    def uniform(self) -> bool:
        return len(set(self.values)) == 1


UNKNOWN_UNIFORM = Lanes(ZEROS, OFFSET)


@dataclass(frozen=True)
class Place:
    """A variable in thread memory, or a part of it."""

    variable: str
    member: str = ""
    is_part: bool = False  # one element, or possibly several
    depends: int = 0  # what decides which part


@dataclass(frozen=True)
class Value:
    depends: int = 0
    lanes: Lanes | None = None  # for integers; for pointers, in bytes
    members: dict[str, Value] = field(default_factory=dict, hash=False)
    target: Place | None = None  # for pointers and references into thread memory
    space: str = ""  # for pointers and references to other memory

    def known(self) -> Lanes | None:
        """Returns the lanes. A value that all lanes share has distance 0 from itself."""
        if self.lanes is not None or self.depends & LANE:
            return self.lanes
        return UNKNOWN_UNIFORM

    def constant(self) -> int | None:
        """Returns the value if it is always the same."""
        if self.lanes is not None and self.lanes.kind == EXACT and self.lanes.uniform:
            return self.lanes.values[0]
        return None

    def with_depends(self, depends: int) -> Value:
        return self if not depends & ~self.depends else replace(self, depends=self.depends | depends)


def number(value: int) -> Value:
    return Value(lanes=Lanes((value,) * 32, EXACT))


def union(*values: Value) -> int:
    depends = 0
    for value in values:
        depends |= value.depends
    return depends


EITHER = Place("")  # one of several variables


def either(one: Place | None, other: Place | None) -> Place | None:
    if one is None or other is None or one == other:
        return one or other
    return Place(one.variable, is_part=True) if one.variable == other.variable else EITHER


def join(one: Value, other: Value) -> Value:
    """Returns what is known if the value is either of the two."""
    if one is other or one == other:
        return one
    members = {}
    for name in one.members.keys() | other.members.keys():
        members[name] = join(one.members.get(name, Value()), other.members.get(name, Value()))
    lanes = one.lanes if one.lanes == other.lanes else None
    return Value(union(one, other), lanes, members, either(one.target, other.target), one.space or other.space)


Values = dict[str, Value]  # by the variable's id


def merge(ways: Sequence[Values]) -> Values:
    """Returns what all of several meeting branches know."""
    merged, *others = ways
    for other in others:
        merged = {name: join(value, other[name]) for name, value in merged.items() if name in other}
    return merged


def sampled(value: Value) -> Value:
    """Marks the value as different in each round of a loop."""
    return (
        value if value.lanes is None else replace(value, lanes=Lanes(value.lanes.values, max(value.lanes.kind, SAMPLE)))
    )


def in_a_loop(before: Value, after: Value) -> Value:
    """Returns the value at the head of a loop, which `before` reaches first and `after` in later rounds."""
    joined = join(before, after)
    if joined.lanes is None and before.lanes is not None:
        joined = replace(joined, lanes=sampled(before).lanes)
    return before if joined == before else joined


def quotient(a: int, b: int) -> int:
    if b == 0:
        return 0
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": quotient,
    "%": lambda a, b: a - quotient(a, b) * b if b else 0,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << min(max(b, 0), 63),
    ">>": lambda a, b: a >> max(b, 0),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "||": lambda a, b: int(bool(a) or bool(b)),
}


def combine(operator: str, one: Lanes | None, other: Lanes | None) -> Lanes | None:
    """Returns the lanes of `one operator other`."""
    if one is None or other is None or operator not in OPERATIONS:
        return None
    kind = max(one.kind, other.kind)
    if kind == OFFSET:
        if one.uniform and other.uniform:
            return UNKNOWN_UNIFORM
        factor = other if one.kind == OFFSET else one
        scales = operator == "*" and factor.kind != OFFSET and factor.uniform
        if operator not in ("+", "-") and not scales:
            return None
    operation = OPERATIONS[operator]
    return Lanes(tuple(map(operation, one.values, other.values)), kind)


def size_of_result(operator: str, one: Value, other: Value, overflowed: int) -> int:
    """Returns the bits that say how large the integer `one operator other` may be. `overflowed` is the place's own bit,
    or 0 if the result has 64 bits.
    """
    a, b = one.depends & SIZE, other.depends & SIZE
    either_size = a | b
    if operator in ("*", "<<"):
        return _size_of_product(one, other, overflowed)
    if operator in ("%", "&"):
        return size_of_smaller(one, other)
    if operator in ("/", ">>"):
        return a & ~LONG | b & OVERFLOWED
    if operator in ("<", ">", "<=", ">=", "==", "!=", "&&", "||"):
        return either_size & (UNBOUNDED | POSITION)
    return either_size


def size_of_smaller(one: Value, other: Value) -> int:
    """Returns the size bits of an integer that is no larger than either."""
    sizes = (one.depends & (SIZE & ~OVERFLOWED), other.depends & (SIZE & ~OVERFLOWED))
    return union(one, other) & OVERFLOWED | min(sizes, key=lambda size: (size & LONG, size & UNBOUNDED, size))


def _size_of_product(one: Value, other: Value, overflowed: int) -> int:
    sizes = (one.depends & SIZE, other.depends & SIZE)
    size = sizes[0] | sizes[1]
    if not size or any(value.constant() in (0, 1) for value in (one, other)):
        return size
    if not overflowed:
        return size | UNBOUNDED | LONG
    is_covered = POSITION in sizes and 0 in sizes
    return size & OVERFLOWED | UNBOUNDED | (0 if is_covered else overflowed)


def choose(condition: Value, one: Value, other: Value) -> Value:
    """Returns `condition ? one : other`."""
    chosen = condition.constant()
    if chosen is not None:
        return one if chosen else other
    result = join(one, other).with_depends(condition.depends & DIFFERS)
    test, a, b = condition.lanes, one.known(), other.known()
    if test is not None and test.kind != OFFSET and a is not None and b is not None and OFFSET not in (a.kind, b.kind):
        values = tuple(x if t else y for t, x, y in zip(test.values, a.values, b.values, strict=True))
        result = replace(result, lanes=Lanes(values, max(test.kind, a.kind, b.kind)))
    return result


BANKS, BANK_BYTES = 32, 4


def bank_passes(lanes: Lanes, size: int) -> int:
    """Returns how often an access asks threadgroup memory. Lanes that are served together (128 bytes) ask once for each
    different word of one bank.
    """
    together = max(1, min(32, BANKS * BANK_BYTES // size))
    most = 1
    for first in range(0, 32, together):
        words: dict[int, set[int]] = {}
        for start in lanes.values[first : first + together]:
            for word in range(start // BANK_BYTES, -(-(start + size) // BANK_BYTES)):
                words.setdefault(word % BANKS, set()).add(word)
        most = max(most, *(len(each) for each in words.values()))
    return most
