"""Evaluates a program's expressions for all lanes at once. flow.py goes through the statements around them.

A place in memory holds one value for all threads that read it. Finding races is left to the simulated device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from evidence.proof.metal.front_end import metal_terms
from evidence.proof.metal.rules import Problem
from evidence.proof.metal.tree import (
    SCALAR_SIZES,
    Layout,
    Node,
    Tree,
    bound_of,
    callee,
    callee_name,
    canonical,
    children,
    element_and_count,
    is_array,
    name_in,
    type_of,
)
from evidence.proof.metal.values import (
    DIFFERS,
    EITHER,
    EXACT,
    LONG,
    OFFSET,
    OVERFLOWED,
    RUN,
    SIZE,
    UNBOUNDED,
    ZEROS,
    Lanes,
    NotUnderstood,
    Place,
    Value,
    Values,
    bank_passes,
    choose,
    combine,
    either,
    merge,
    number,
    size_of_result,
    union,
)

SPACES = {"__local": "device", "__global_device": "threadgroup", "__global": "constant", "__constant": "constant"}
KEEPING = ("NoOp", "BitCast", "AddressSpaceConversion", "UncheckedDerivedToBase", "DerivedToBase")
WRAPPERS = ("ParenExpr", "MaterializeTemporaryExpr", "ExprWithCleanups", "ConstantExpr", "CXXBindTemporaryExpr")
INTEGERS = set(SCALAR_SIZES) - {"bool", "half", "bfloat", "float"}
RUN_TIME_INDEX = "a per-thread array is indexed by a value that is not known when it is compiled"
LITERALS = ("FloatingLiteral", "StringLiteral", "CXXNullPtrLiteralExpr", "CharacterLiteral")


def _named(name: str, value: Value) -> dict[str, Value]:
    """Returns a member of that name, and its own members as `name.member`."""
    return {name: value} | {f"{name}.{inner}": each for inner, each in value.members.items()}


@dataclass(frozen=True)
class Memory:
    """Something in device, constant or threadgroup memory."""

    address: Value


@dataclass
class Access:
    """An access of threadgroup memory, with the most passes that any call of it needs in the model."""

    place: str
    what: str
    size: int
    passes: int


@dataclass
class Evaluation(ABC):
    tree: Tree
    layout: Layout
    problems: set[Problem] = field(default_factory=set, init=False)
    accesses: dict[tuple[str, int], Access] = field(default_factory=dict, init=False)
    _values: Values = field(default_factory=dict, init=False)
    _declared: dict[str, int] = field(default_factory=dict, init=False)  # what decided if it is declared
    _rounds_at: dict[str, int] = field(default_factory=dict, init=False)  # the loops open at that point
    _globals: dict[str, Node] = field(default_factory=dict, init=False)
    _last: dict[str, int] = field(default_factory=dict, init=False)  # what counters of unrolled loops end with
    _narrow: dict[str, int] = field(default_factory=dict, init=False)  # numbers of 32-bit products' places
    _rounds_open: int = field(default=0, init=False)  # open loops that are not unrolled
    _control: int = field(default=0, init=False)

    @abstractmethod
    def _here(self) -> int:
        """Returns the bits of what decides which threads run this."""

    @abstractmethod
    def _declare_global(self, identifier: str) -> None:
        """Gives a constant of program scope its value."""

    @abstractmethod
    def _get_CallExpr(self, node: Node) -> Value:
        """Returns what a call returns, as a pointer if it is a reference."""

    @abstractmethod
    def _get_CXXMemberCallExpr(self, node: Node) -> Value: ...

    @abstractmethod
    def _get_CXXOperatorCallExpr(self, node: Node) -> Value: ...

    def _each_branch(self, deciding: int, branches: Sequence[Callable[[], Value]]) -> list[Value]:
        """Returns the value of each branch, from the same state. Afterwards any of them may have been taken."""
        control, self._control = self._control, self._control | deciding & DIFFERS
        before, ends, results = self._values, [], []
        for branch in branches:
            self._values = dict(before)
            results.append(branch())
            ends.append(self._values)
        self._control, self._values = control, merge(ends)
        return results

    def _complain(self, node: Node, message: str) -> None:
        self.problems.add(Problem(self.tree.places.of(node), message))

    # ---- expressions ----------------------------------------------------------------------------------------------

    def _evaluate(self, node: Node) -> Value:
        """Returns the value. For something in memory, returns its content."""
        kind = node["kind"]
        if node.get("valueCategory") == "lvalue" and (self._is_place(node) or self._returns_reference(node)):
            return self._load(node, self._place(node))
        if kind in LITERALS:
            return Value()
        if kind in WRAPPERS or kind == "SubstNonTypeTemplateParmExpr":
            return self._evaluate(children(node)[-1])
        if kind.endswith("CastExpr"):
            return self._cast(node)
        method = getattr(self, f"_get_{kind}", None)
        if method is None:
            raise NotUnderstood(f"{self.tree.places.of(node)}: a {kind}")
        value: Value = method(node)
        return value

    def _cast(self, node: Node) -> Value:
        kind, inner = node.get("castKind", "NoOp"), children(node)[0]
        if kind == "FunctionToPointerDecay":
            return Value()
        if kind == "ArrayToPointerDecay":
            return self._reference(inner)
        value = self._evaluate(inner)
        if kind == "IntegralCast":
            size = value.depends
            if size & LONG and not self._is_wide(node):
                size = size & ~LONG | self._overflowed(node)
            return replace(value, depends=size, lanes=self._fitted(value.lanes, node))
        if kind == "LValueToRValue" or kind in KEEPING:
            return value
        if kind == "IntegralToBoolean":
            return replace(value, lanes=combine("!=", value.known(), number(0).lanes))
        if kind == "FloatingToIntegral":
            return Value(value.depends & DIFFERS | UNBOUNDED)
        if kind in ("ConstructorConversion", "UserDefinedConversion", "ToVoid") or "Float" in kind:
            return Value(value.depends)
        raise NotUnderstood(f"{self.tree.places.of(node)}: a cast of the kind {kind}")

    def _get_IntegerLiteral(self, node: Node) -> Value:
        return number(int(node["value"]))

    def _get_CXXBoolLiteralExpr(self, node: Node) -> Value:
        return number(int(node["value"]))

    def _get_DeclRefExpr(self, node: Node) -> Value:
        return Value()  # an enumerator or a function

    def _get_UnaryExprOrTypeTraitExpr(self, node: Node) -> Value:
        return number(self.layout.size(node["argType"].get("desugaredQualType") or node["argType"]["qualType"]))

    def _get_MemberExpr(self, node: Node) -> Value:
        whole = self._evaluate(children(node)[0])
        return whole.members.get(node.get("name", ""), Value(whole.depends))

    def _get_ConditionalOperator(self, node: Node) -> Value:
        condition, one, other = children(node)
        test = self._evaluate(condition)
        if (decided := test.constant()) is not None:
            return self._evaluate(one if decided else other)
        return choose(
            test, *self._each_branch(test.depends, [partial(self._evaluate, one), partial(self._evaluate, other)])
        )

    def _get_UnaryOperator(self, node: Node) -> Value:
        operator, inner = node["opcode"], children(node)[0]
        if operator == "&":
            return self._reference(inner)
        if operator in ("++", "--"):
            before = self._evaluate(inner)
            after = self._arithmetic(node, operator[0], before, number(1))
            self._store(inner, self._place(inner), after)
            return before if node.get("isPostfix") else after
        value = self._evaluate(inner)
        if operator == "-":
            return Value(value.depends, self._fitted(combine("-", number(0).lanes, value.known()), node))
        if operator == "!":
            return Value(value.depends, combine("==", value.known(), number(0).lanes))
        return Value(value.depends)

    def _get_BinaryOperator(self, node: Node) -> Value:
        operator, (left, right) = node["opcode"], children(node)
        if operator == "=":
            value = self._evaluate(right)
            self._store(left, self._place(left), value)
            return value
        one = self._evaluate(left)
        if operator in ("&&", "||") and one.constant() is None:
            other, _ = self._each_branch(one.depends, [partial(self._evaluate, right), Value])
        elif operator in ("&&", "||") and bool(one.constant()) == (operator == "||"):
            return one
        else:
            other = self._evaluate(right)
        return other if operator == "," else self._arithmetic(node, operator, one, other)

    def _arithmetic(self, node: Node, operator: str, one: Value, other: Value) -> Value:
        a, b = one.known(), other.known()
        pointer = one if one.space or one.target else other if other.space or other.target else None
        text = type_of(node).replace("__private", "").rstrip()
        if pointer is not None and text.endswith("*"):
            size = Lanes((self._pointee_size(text),) * 32, EXACT)
            a, b = (a, combine("*", b, size)) if pointer is one else (combine("*", a, size), b)
            target = replace(pointer.target, is_part=True) if pointer.target else None
            self._check_index(node, pointer.space, other if pointer is one else one)
            depends = union(one, other) & ~SIZE
            return Value(depends, combine(operator, a, b), target=target, space=pointer.space)
        if pointer is not None and operator == "-":
            large = UNBOUNDED | LONG
        else:
            large = size_of_result(operator, one, other, 0 if self._is_wide(node) else self._overflowed(node))
        return Value(union(one, other) & ~SIZE | large, self._fitted(combine(operator, a, b), node))

    @staticmethod
    def _is_wide(node: Node) -> bool:
        """Returns whether an integer of the expression's type has 64 bits."""
        return SCALAR_SIZES.get(canonical(element_and_count(type_of(node))[0])) == 8

    def _overflowed(self, node: Node) -> int:
        """Returns the bit for an integer that may not fit into 32 bits at this place."""
        place = self.tree.places.of(node)
        return -OVERFLOWED << self._narrow.setdefault(place, len(self._narrow))

    def _check_index(self, node: Node, space: str, index: Value) -> None:
        if space != "device" or not index.depends & OVERFLOWED:
            return
        words = f"may not fit into 32 bits, and is an index into device memory at {self.tree.places.of(node)}"
        for place, which in self._narrow.items():
            if index.depends & -OVERFLOWED << which:
                self.problems.add(Problem(place, words))

    @staticmethod
    def _fitted(lanes: Lanes | None, node: Node) -> Lanes | None:
        """Returns the lanes as an integer of the expression's type holds them."""
        name = canonical(element_and_count(type_of(node))[0])
        if lanes is None or lanes.kind == OFFSET or name not in INTEGERS:
            return lanes
        count = 1 << 8 * SCALAR_SIZES[name]
        lowest = 0 if name.startswith("unsigned") else -count // 2
        return Lanes(tuple((value - lowest) % count + lowest for value in lanes.values), lanes.kind)

    def _get_CompoundAssignOperator(self, node: Node) -> Value:
        left, right = children(node)
        value = self._arithmetic(node, node["opcode"][:-1], self._evaluate(left), self._evaluate(right))
        self._store(left, self._place(left), value)
        return value

    def _get_CXXConstructExpr(self, node: Node) -> Value:
        arguments = [self._evaluate(child) for child in children(node)]
        if len(arguments) == 1 and not arguments[0].space:
            return arguments[0]  # a copy
        return Value(union(*arguments))

    _get_CXXTemporaryObjectExpr = _get_CXXConstructExpr
    _get_CXXScalarValueInitExpr = _get_CXXConstructExpr
    _get_ImplicitValueInitExpr = _get_CXXConstructExpr

    def _get_InitListExpr(self, node: Node) -> Value:
        arguments = [self._evaluate(child) for child in children(node)]
        members: dict[str, Value] = {}
        for name, value in zip(self.layout.fields(type_of(node)), arguments, strict=False):
            members |= _named(name, value)
        return Value(union(*arguments), members=members)

    # ---- places: what can be written or pointed to -------------------------------------------------------------------

    @staticmethod
    def _is_place(node: Node) -> bool:
        """Returns whether an expression only names something, without an assignment or a call."""
        kind = node["kind"]
        if kind == "DeclRefExpr":
            return node["referencedDecl"]["kind"] in ("VarDecl", "ParmVarDecl")
        return kind in ("MemberExpr", "ArraySubscriptExpr") or (kind == "UnaryOperator" and node["opcode"] == "*")

    def _returns_reference(self, call: Node) -> bool:
        """Returns whether a call gives an lvalue. The library's operators are known one by one."""
        if call["kind"] == "CXXOperatorCallExpr":
            return self.tree.function(callee(call)) is not None
        return call["kind"] in ("CallExpr", "CXXMemberCallExpr")

    def _place(self, node: Node) -> Place | Memory:
        kind = node["kind"]
        if kind in WRAPPERS or kind.endswith("CastExpr"):
            if node.get("castKind") == "LValueToRValue":
                return self._pointed(node, self._evaluate(node))
            return self._place(children(node)[0])
        method = getattr(self, f"_find_{kind}", None)
        if method is None:
            raise NotUnderstood(f"{self.tree.places.of(node)}: a place given by a {kind}")
        place: Place | Memory = method(node)
        return place

    def _find_DeclRefExpr(self, node: Node) -> Place | Memory:
        identifier = node["referencedDecl"]["id"]
        if identifier not in self._values:
            self._declare_global(identifier)
        value = self._values[identifier]
        if "&" in type_of(self._globals.get(identifier) or node["referencedDecl"]) and (value.space or value.target):
            return self._pointed(node, value)
        return Place(identifier)

    def _find_StringLiteral(self, node: Node) -> Place | Memory:
        return Memory(Value(space="constant"))

    def _find_MemberExpr(self, node: Node) -> Place | Memory:
        inner = children(node)[0]
        whole = self._pointed(node, self._evaluate(inner)) if node.get("isArrow") else self._place(inner)
        name = node.get("name", "")
        if isinstance(whole, Memory):
            return Memory(replace(whole.address, lanes=None if name else whole.address.lanes))
        if not name:  # a class of the library
            return whole
        return replace(whole, member=f"{whole.member}.{name}" if whole.member else name)

    def _find_ArraySubscriptExpr(self, node: Node) -> Place | Memory:
        array, index = children(node)
        count, last = bound_of(type_of(children(array)[0])), self._last.get(name_in(index), 0)
        if array.get("castKind") == "ArrayToPointerDecay" and count <= last:
            self._complain(node, f"the last round of a loop uses element {last} of an array of {count}")
        return self._element(node, self._evaluate(array), self._evaluate(index), type_of(array))

    def _find_CXXOperatorCallExpr(self, node: Node) -> Place | Memory:
        name, arguments = callee_name(node), children(node)[1:]
        if self._returns_reference(node):
            return self._pointed(node, self._get_CXXOperatorCallExpr(node))
        if name != "operator[]":  # an assignment returns its left side
            self._get_CXXOperatorCallExpr(node)
            return self._place(arguments[0])
        index = self._evaluate(arguments[1])
        whole = self._place(arguments[0])
        if isinstance(whole, Memory):
            return Memory(Value(union(whole.address, index), space=whole.address.space))
        return self._indexed(node, whole, index)

    def _find_UnaryOperator(self, node: Node) -> Place | Memory:
        inner = children(node)[0]
        if node["opcode"] == "*":
            return self._pointed(node, self._evaluate(inner))
        self._get_UnaryOperator(node)
        return self._place(inner)

    def _find_BinaryOperator(self, node: Node) -> Place | Memory:
        self._get_BinaryOperator(node)
        return self._place(children(node)[-1 if node["opcode"] == "," else 0])

    def _find_CompoundAssignOperator(self, node: Node) -> Place | Memory:
        self._get_CompoundAssignOperator(node)
        return self._place(children(node)[0])

    def _find_CallExpr(self, node: Node) -> Place | Memory:
        """The translation turns `threadgroup T name` into `threadgroup_variable<T>("name")`."""
        if callee_name(node) == "threadgroup_variable":
            return Memory(Value(RUN, Lanes(ZEROS, OFFSET), space="threadgroup"))
        return self._pointed(node, self._get_CallExpr(node))

    def _find_CXXMemberCallExpr(self, node: Node) -> Place | Memory:
        """Handles calls like `matrix.thread_elements()`, which return a part of the object."""
        result = self._get_CXXMemberCallExpr(node)
        if self.tree.function(callee(node)) is not None:
            return self._pointed(node, result)
        whole = self._place(children(callee(node))[0])
        return replace(whole, is_part=True) if isinstance(whole, Place) else whole

    def _get_CXXDefaultArgExpr(self, node: Node) -> Value:
        return Value()

    def _element(self, node: Node, array: Value, index: Value, text: str) -> Place | Memory:
        whole = self._pointed(node, array)
        if isinstance(whole, Place):
            return self._indexed(node, whole, index)
        self._check_index(node, array.space, index)
        size = Lanes((self._pointee_size(text),) * 32, EXACT)
        lanes = combine("+", array.known(), combine("*", index.known(), size))
        return Memory(Value(union(array, index), lanes, space=array.space))

    def _indexed(self, node: Node, whole: Place, index: Value) -> Place:
        part = replace(whole, is_part=True, depends=whole.depends | index.depends & DIFFERS)
        if part.depends & RUN:
            self._complain(node, RUN_TIME_INDEX)
        return part

    def _pointed(self, node: Node, pointer: Value) -> Place | Memory:
        """Returns what a pointer or reference leads to.

        One that may lead to either of two variables would keep both out of registers. It is refused, like everything
        that the checks cannot follow.
        """
        target, place = pointer.target, self.tree.places.of(node)
        if target is None and pointer.space:
            return Memory(pointer)
        if target == EITHER:
            raise NotUnderstood(f"{place}: a pointer to either of two variables")
        if target is None or target.variable not in self._values:
            raise NotUnderstood(f"{place}: a pointer to an unknown place")
        if target.is_part and pointer.depends & RUN:
            self._complain(node, RUN_TIME_INDEX)
        return replace(target, depends=pointer.depends)

    def _reference(self, node: Node) -> Value:
        """Returns a pointer to what the expression names. For an array, returns one to its first element."""
        if node.get("valueCategory") != "lvalue":
            return self._evaluate(node)
        place = self._place(node)
        if isinstance(place, Memory):
            return place.address
        return Value(place.depends, target=replace(place, depends=0))

    # ---- memory ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _space(text: str) -> str:
        if not text.replace("__private", "").rstrip().endswith(("*", "&")):
            return ""
        words = text.split("*")[0].split("&")[0].split()
        return next((SPACES[word] for word in words if word in SPACES), "")

    def _pointee_size(self, text: str) -> int:
        name = text.replace("__private", "").rstrip()
        return self.layout.size(name[: name.rindex("*")]) if "*" in name else self.layout.size(name)

    def _load(self, node: Node, place: Place | Memory) -> Value:
        if isinstance(place, Memory):
            self._note(node, place.address)
            return Value(place.address.depends & DIFFERS | RUN | UNBOUNDED, space=self._space(type_of(node)))
        value = self._values[place.variable]
        if place.is_part:
            return Value(value.depends | place.depends, target=value.target, space=value.space)
        if place.member:
            value = value.members.get(place.member, Value(value.depends))
        return value.with_depends(place.depends)

    def _store(self, node: Node, place: Place | Memory, value: Value) -> None:
        if isinstance(place, Memory):
            self._note(node, place.address)
            return
        decided = self._here() & ~self._declared.get(place.variable, 0)
        if self._rounds_open > self._rounds_at.get(place.variable, 0):
            decided |= RUN
        value = value.with_depends(decided | place.depends)
        before = self._values[place.variable]
        if place.is_part:
            target, space = either(before.target, value.target), before.space or value.space
            after = Value(union(before, value), target=target, space=space)
        elif place.member:
            members = {**before.members, **_named(place.member, value)}
            after = Value(union(before, value), members=members)
        else:
            after = value
        self._values[place.variable] = after

    def _note(self, node: Node, address: Value) -> None:
        """Notes an access of threadgroup memory for the model."""
        lanes = address.known()
        if address.space != "threadgroup" or lanes is None or is_array(type_of(node)):
            return
        size = self.layout.size(type_of(node))
        key = (self.tree.places.of(node), size)
        passes = bank_passes(lanes, size)
        if key not in self.accesses or self.accesses[key].passes < passes:
            self.accesses[key] = Access(key[0], metal_terms(type_of(node)), size, passes)
