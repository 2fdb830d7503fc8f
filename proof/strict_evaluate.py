"""Expressions of a program, evaluated for all lanes at once: strict_flow.py goes through the statements around them.

Memory holds one value at one place for all threads that look at it: a race is for the simulated device to find.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from proof.strict_front_end import metal_terms
from proof.strict_rules import Problem
from proof.strict_tree import Layout, Node, Tree, callee, callee_name, children, is_array, type_of
from proof.strict_values import (
    EITHER,
    EXACT,
    OFFSET,
    RUN,
    ZEROS,
    Lanes,
    NotUnderstood,
    Place,
    Value,
    bank_passes,
    choose,
    combine,
    number,
    union,
)

SPACES = {"__local": "device", "__global_device": "threadgroup", "__global": "constant", "__constant": "constant"}
KEEPING = ("NoOp", "IntegralCast", "BitCast", "AddressSpaceConversion", "UncheckedDerivedToBase", "DerivedToBase")
WRAPPERS = ("ParenExpr", "MaterializeTemporaryExpr", "ExprWithCleanups", "ConstantExpr", "CXXBindTemporaryExpr")
LITERALS = ("FloatingLiteral", "StringLiteral", "CXXNullPtrLiteralExpr", "CharacterLiteral")


@dataclass(frozen=True)
class Memory:
    """Something in device, constant or threadgroup memory."""

    address: Value


@dataclass
class Access:
    """Of threadgroup memory: the most passes that any call of it needs in the model."""

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
    _values: dict[str, Value] = field(default_factory=dict, init=False)
    _declared: dict[str, int] = field(default_factory=dict, init=False)  # what decided over reaching the declaration
    _rounds_at: dict[str, int] = field(default_factory=dict, init=False)  # how many loops were open there
    _globals: dict[str, Node] = field(default_factory=dict, init=False)
    _rounds_open: int = field(default=0, init=False)  # loops around this that are not unrolled
    _control: int = field(default=0, init=False)

    @abstractmethod
    def _here(self) -> int:
        """What decides over which threads run this."""

    @abstractmethod
    def _declare_global(self, identifier: str) -> None:
        """Gives a constant of program scope its value."""

    def _complain(self, node: Node, message: str) -> None:
        self.problems.add(Problem(self.tree.places.of(node), message))

    # ---- expressions ----------------------------------------------------------------------------------------------

    def _evaluate(self, node: Node) -> Value:
        """The value; of what lies in memory, what is there."""
        kind = node["kind"]
        if node.get("valueCategory") == "lvalue" and self._is_place(node):
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
        if kind == "LValueToRValue" or kind in KEEPING:
            return value
        if kind == "IntegralToBoolean":
            return replace(value, lanes=combine("!=", value.known(), number(0).lanes))
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
        control, self._control = self._control, self._control | test.depends
        chosen = choose(test, self._evaluate(one), self._evaluate(other))
        self._control = control
        return chosen

    def _get_UnaryOperator(self, node: Node) -> Value:
        operator, inner = node["opcode"], children(node)[0]
        if operator == "&":
            return self._reference(inner)
        if operator in ("++", "--"):
            before = self._evaluate(inner)
            after = Value(before.depends, combine(operator[0], before.known(), number(1).lanes), space=before.space)
            self._store(inner, self._place(inner), after)
            return before if node.get("isPostfix") else after
        value = self._evaluate(inner)
        if operator == "-":
            return Value(value.depends, combine("-", number(0).lanes, value.known()))
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
        if operator in ("&&", "||"):
            if one.constant() is not None and bool(one.constant()) == (operator == "||"):
                return one
            control, self._control = self._control, self._control | one.depends
            other = self._evaluate(right)
            self._control = control
        else:
            other = self._evaluate(right)
        return other if operator == "," else self._arithmetic(node, operator, one, other)

    def _arithmetic(self, node: Node, operator: str, one: Value, other: Value) -> Value:
        a, b = one.known(), other.known()
        pointer = one if one.space or one.target else other if other.space or other.target else None
        text = type_of(node)
        if pointer is not None and text.rstrip().endswith("*"):
            size = Lanes((self._pointee_size(text),) * 32, EXACT)
            a, b = (a, combine("*", b, size)) if pointer is one else (combine("*", a, size), b)
            target = replace(pointer.target, is_part=True) if pointer.target else None
            return Value(union(one, other), combine(operator, a, b), target=target, space=pointer.space)
        return Value(union(one, other), combine(operator, a, b))

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
    _get_InitListExpr = _get_CXXConstructExpr
    _get_CXXScalarValueInitExpr = _get_CXXConstructExpr
    _get_ImplicitValueInitExpr = _get_CXXConstructExpr

    # ---- places: what can be written or pointed to -------------------------------------------------------------------

    @staticmethod
    def _is_place(node: Node) -> bool:
        """An expression that names something and does nothing else: no assignment, no call."""
        kind = node["kind"]
        if kind == "DeclRefExpr":
            return node["referencedDecl"]["kind"] in ("VarDecl", "ParmVarDecl")
        return kind in ("MemberExpr", "ArraySubscriptExpr") or (kind == "UnaryOperator" and node["opcode"] == "*")

    def _place(self, node: Node) -> Place | Memory:
        kind = node["kind"]
        if kind in WRAPPERS or kind.endswith("CastExpr"):
            if node.get("castKind") == "LValueToRValue":
                return self._pointed(self._evaluate(node))
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
            return self._pointed(value)
        return Place(identifier)

    def _find_StringLiteral(self, node: Node) -> Place | Memory:
        return Memory(Value(space="constant"))

    def _find_MemberExpr(self, node: Node) -> Place | Memory:
        inner = children(node)[0]
        whole = self._pointed(self._evaluate(inner)) if node.get("isArrow") else self._place(inner)
        name = node.get("name", "")
        if isinstance(whole, Memory):
            return Memory(replace(whole.address, lanes=None if name else whole.address.lanes))
        if not name:  # of the library's own classes
            return whole
        return replace(whole, member=name) if not whole.member else replace(whole, is_part=True)

    def _find_ArraySubscriptExpr(self, node: Node) -> Place | Memory:
        array, index = children(node)
        return self._element(node, self._evaluate(array), self._evaluate(index), type_of(array))

    def _find_CXXOperatorCallExpr(self, node: Node) -> Place | Memory:
        name, arguments = callee_name(node), children(node)[1:]
        if name != "operator[]":  # an assignment, which returns its left side
            self._evaluate(node)
            return self._place(arguments[0])
        index = self._evaluate(arguments[1])
        whole = self._place(arguments[0])
        if isinstance(whole, Memory):
            return Memory(Value(union(whole.address, index), space=whole.address.space))
        return self._indexed(node, whole, index)

    def _find_UnaryOperator(self, node: Node) -> Place | Memory:
        inner = children(node)[0]
        if node["opcode"] == "*":
            return self._pointed(self._evaluate(inner))
        self._get_UnaryOperator(node)
        return self._place(inner)

    def _find_BinaryOperator(self, node: Node) -> Place | Memory:
        self._get_BinaryOperator(node)
        return self._place(children(node)[-1 if node["opcode"] == "," else 0])

    def _find_CompoundAssignOperator(self, node: Node) -> Place | Memory:
        self._get_CompoundAssignOperator(node)
        return self._place(children(node)[0])

    def _find_CallExpr(self, node: Node) -> Place | Memory:
        """`threadgroup_variable<T>("name")` is what the translation makes of `threadgroup T name`."""
        if callee_name(node) == "threadgroup_variable":
            return Memory(Value(RUN, Lanes(ZEROS, OFFSET), space="threadgroup"))
        return self._pointed(self._evaluate(node))

    def _find_CXXMemberCallExpr(self, node: Node) -> Place | Memory:
        """As `matrix.thread_elements()`: a part of the object."""
        if self.tree.function(callee(node)) is not None:
            return self._pointed(self._evaluate(node))
        self._evaluate(node)
        whole = self._place(children(callee(node))[0])
        return replace(whole, is_part=True) if isinstance(whole, Place) else whole

    def _get_CXXDefaultArgExpr(self, node: Node) -> Value:
        return Value()

    def _element(self, node: Node, array: Value, index: Value, text: str) -> Place | Memory:
        whole = self._pointed(array)
        if isinstance(whole, Place):
            return self._indexed(node, whole, index)
        size = Lanes((self._pointee_size(text),) * 32, EXACT)
        lanes = combine("+", array.known(), combine("*", index.known(), size))
        return Memory(Value(union(array, index), lanes, space=array.space))

    def _indexed(self, node: Node, whole: Place, index: Value) -> Place:
        if index.depends & RUN:
            self._complain(node, "a per-thread array is indexed by a value that is not known when it is compiled")
        return replace(whole, is_part=True)

    @staticmethod
    def _pointed(pointer: Value) -> Place | Memory:
        if pointer.target == EITHER:
            raise NotUnderstood("a pointer to either of two variables")
        return pointer.target or Memory(pointer)

    def _reference(self, node: Node) -> Value:
        """A pointer to what the expression names; of an array, to its first element."""
        if node.get("valueCategory") != "lvalue":
            return self._evaluate(node)
        place = self._place(node)
        if isinstance(place, Memory):
            return place.address
        held = self._values[place.variable]
        if held.target is not None and is_array(type_of(node)) is False and type_of(node).rstrip().endswith("*"):
            return held  # a reference to a pointer stands for what it points to
        return Value(target=place)

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
            return Value(place.address.depends | RUN, space=self._space(type_of(node)))
        value = self._values[place.variable]
        if place.member and not place.is_part:
            return value.members.get(place.member, Value(value.depends))
        if place.is_part:
            return Value(value.depends, target=value.target, space=value.space)
        return value

    def _store(self, node: Node, place: Place | Memory, value: Value) -> None:
        if isinstance(place, Memory):
            self._note(node, place.address)
            return
        decided = self._here() & ~self._declared.get(place.variable, 0)
        if self._rounds_open > self._rounds_at.get(place.variable, 0):
            decided |= RUN
        value = value.with_depends(decided)
        before = self._values[place.variable]
        if place.is_part:
            after = Value(union(before, value), target=before.target, space=before.space)
        elif place.member:
            members = {**before.members, place.member: value}
            after = Value(union(before, value), members=members)
        else:
            after = value
        self._values[place.variable] = after

    def _note(self, node: Node, address: Value) -> None:
        """For the model: an access of threadgroup memory."""
        lanes = address.known()
        if address.space != "threadgroup" or lanes is None or is_array(type_of(node)):
            return
        size = self.layout.size(type_of(node))
        key = (self.tree.places.of(node), size)
        passes = bank_passes(lanes, size)
        if key not in self.accesses or self.accesses[key].passes < passes:
            self.accesses[key] = Access(key[0], metal_terms(type_of(node)), size, passes)
