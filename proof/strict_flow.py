"""Walks a kernel as its threads would, all at once, and follows what each value depends on (strict_values.py).

It finds barriers and simdgroup operations that some threads may not reach, and per-thread arrays that are indexed by a
value known only when the kernel runs; and for the model of bank conflicts it notes each access to threadgroup memory.
What it does not know ends in an error rather than in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from proof.strict_front_end import metal_terms
from proof.strict_rules import Problem
from proof.strict_tree import (
    Kernel,
    Layout,
    Node,
    NotUnderstood,
    Tree,
    body_of,
    callee,
    callee_name,
    children,
    is_array,
    parameters_of,
    type_of,
)
from proof.strict_values import (
    EXACT,
    LANE,
    OFFSET,
    RUN,
    SAMPLE,
    SIMDGROUP,
    THREAD,
    ZEROS,
    Lanes,
    Place,
    Value,
    bank_passes,
    choose,
    combine,
    in_a_loop,
    join,
    number,
    union,
)

SPACES = {"__local": "device", "__global_device": "threadgroup", "__global": "constant", "__constant": "constant"}
BUILTINS = {
    "thread_index_in_simdgroup": Value(LANE | RUN, Lanes(tuple(range(32)), EXACT)),
    "thread_index_in_threadgroup": Value(THREAD | RUN, Lanes(tuple(range(32)), SAMPLE)),
    "simdgroup_index_in_threadgroup": Value(SIMDGROUP | RUN, Lanes(ZEROS, SAMPLE)),
    "thread_index_in_quadgroup": Value(LANE | RUN),
    "quadgroup_index_in_threadgroup": Value(THREAD | RUN),
    "thread_position_in_threadgroup": Value(THREAD | RUN),
    "thread_position_in_grid": Value(THREAD | RUN),
}
ALIKE = Value(RUN)  # positions of the threadgroup, sizes: the same for all threads of a threadgroup

# What all lanes get alike; shuffles and broadcasts do where all ask for the same lane.
REDUCTIONS = ("sum", "product", "min", "max", "and", "or", "xor", "all", "any", "ballot", "broadcast_first")
SELECTIONS = ("simd_shuffle", "simd_broadcast", "quad_shuffle", "quad_broadcast")
CASTS_THAT_KEEP = ("NoOp", "IntegralCast", "BitCast", "AddressSpaceConversion", "UncheckedDerivedToBase", "DerivedToBase")
WRAPPERS = ("ParenExpr", "MaterializeTemporaryExpr", "ExprWithCleanups", "ConstantExpr", "CXXBindTemporaryExpr")
LITERALS = ("FloatingLiteral", "StringLiteral", "CXXNullPtrLiteralExpr", "CharacterLiteral")


@dataclass(frozen=True)
class Memory:
    """Something in device, constant or threadgroup memory."""

    address: Value


@dataclass
class Frame:
    """A call in progress: the threads that are in it, and what made others leave."""

    entered: int  # what decided over getting here
    this: Value | None = None
    left: int = 0  # what decided over returns so far
    left_at: str = ""
    loop_left: int = 0  # what decided over leaving the innermost loop, or its present round
    result: Value | None = None


@dataclass
class Access:
    """Of threadgroup memory: the most passes that any call of it needs in the model."""

    place: str
    what: str
    size: int
    passes: int


@dataclass
class Flow:
    tree: Tree
    layout: Layout
    kernel: Kernel
    problems: set[Problem] = field(default_factory=set)
    accesses: dict[tuple[str, int], Access] = field(default_factory=dict)
    _values: dict[str, Value] = field(default_factory=dict)
    _declared: dict[str, int] = field(default_factory=dict)  # what decided over reaching the declaration
    _frames: list[Frame] = field(default_factory=list)
    _globals: dict[str, Node] = field(default_factory=dict)
    _control: int = 0

    def run(self) -> None:
        for node in self.tree.everything():
            if node["kind"] == "VarDecl":
                self._globals.setdefault(node["id"], node)
        for parameter in parameters_of(self.kernel.function):
            value = BUILTINS.get(self.kernel.builtins.get(parameter["id"], ""), ALIKE)
            space = self._space(type_of(parameter))
            self._values[parameter["id"]] = replace(value, space=space) if space else value
        self._call_body(self.kernel.function)

    # ---- control --------------------------------------------------------------------------------------------------

    def _here(self) -> int:
        """What decides over which threads run this."""
        frame = self._frames[-1]
        return self._control | frame.left | frame.loop_left

    def _complain(self, node: Node, message: str) -> None:
        self.problems.add(Problem(self.tree.places.of(node), message))

    def _meet(self, node: Node, name: str, deciding: int, who: str) -> None:
        """All of `who` must come by; those that `deciding` tells apart may not."""
        if not self._here() & deciding:
            return
        left = next((frame for frame in reversed(self._frames) if frame.left & deciding), None)
        why = f"after the return at {left.left_at}, which" if left else "under a condition that"
        self._complain(node, f"{name} {why} differs between {who}: not all of them reach it")

    def _call_body(self, function: Node, this: Value | None = None) -> Value:
        body = body_of(function)
        assert body is not None
        frame, control = Frame(self._here() if self._frames else 0, this), self._control
        self._control = frame.entered
        self._frames.append(frame)
        self._statement(body)
        self._frames.pop()
        self._control = control
        return frame.result or Value()

    # ---- statements -----------------------------------------------------------------------------------------------

    def _statement(self, node: Node) -> None:
        kind = node["kind"]
        method = getattr(self, f"_do_{kind}", None)
        if method is not None:
            method(node)
        elif kind.endswith(("Expr", "Operator", "Literal", "Cleanups")):
            self._evaluate(node)
        else:
            raise NotUnderstood(f"{self.tree.places.of(node)}: a {kind}")

    def _do_NullStmt(self, node: Node) -> None:
        pass

    def _do_CompoundStmt(self, node: Node) -> None:
        for child in children(node):
            self._statement(child)

    def _do_AttributedStmt(self, node: Node) -> None:
        hints = [child for child in children(node) if child["kind"] == "LoopHintAttr"]
        statement = children(node)[-1]
        if statement["kind"] == "ForStmt":
            self._loop(statement, is_unrolled=bool(hints))
        else:
            self._statement(statement)

    def _do_DeclStmt(self, node: Node) -> None:
        for child in children(node):
            if child["kind"] == "VarDecl":
                self._declare(child)

    def _declare(self, node: Node) -> None:
        initial = children(node)
        self._declared[node["id"]] = self._here()
        if "&" in type_of(node) and initial:
            self._values[node["id"]] = self._reference(initial[0])
        elif initial:
            value = self._evaluate(initial[0])
            self._values[node["id"]] = replace(value, lanes=None) if is_array(type_of(node)) else value
        else:
            self._values[node["id"]] = Value()

    def _do_ReturnStmt(self, node: Node) -> None:
        frame = self._frames[-1]
        here = self._here()
        for child in children(node):
            is_place = child.get("valueCategory") == "lvalue"
            value = (self._reference(child) if is_place else self._evaluate(child)).with_depends(here & ~frame.entered)
            frame.result = value if frame.result is None else join(frame.result, value)
        if here & THREAD & ~frame.left:
            frame.left_at = self.tree.places.of(node)
        frame.left |= here & ~frame.entered

    def _do_BreakStmt(self, node: Node) -> None:
        self._frames[-1].loop_left |= self._control

    _do_ContinueStmt = _do_BreakStmt

    def _do_IfStmt(self, node: Node) -> None:
        parts = children(node)
        condition = self._evaluate(parts[0])
        decided = condition.constant()
        branches = [part for taken, part in zip((True, False), parts[1:], strict=False) if decided in (None, int(taken))]
        if decided is not None:
            for branch in branches:
                self._statement(branch)
            return
        before = dict(self._values)
        control, self._control = self._control, self._control | condition.depends
        outcomes = []
        for branch in branches:
            self._values = dict(before)
            self._statement(branch)
            outcomes.append(self._values)
        if len(branches) == 1:
            outcomes.append(before)
        self._control = control
        self._values = self._merge(outcomes[0], outcomes[1])

    def _merge(self, one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
        merged = {**other, **one}
        for name in one.keys() & other.keys():
            if one[name] is not other[name]:
                merged[name] = join(one[name], other[name])
        return merged

    def _do_ForStmt(self, node: Node) -> None:
        self._loop(node, is_unrolled=False)

    def _do_WhileStmt(self, node: Node) -> None:
        condition, body = children(node)
        self._rounds(condition, body, None, self._control | RUN)

    def _do_DoStmt(self, node: Node) -> None:
        body, condition = children(node)
        self._rounds(condition, body, None, self._control | RUN)

    def _loop(self, node: Node, is_unrolled: bool) -> None:
        first, _, condition, step, body = ((each or None) for each in node["inner"])
        if first is not None:
            self._statement(first)
        self._rounds(condition, body, step, self._control | (0 if is_unrolled else RUN))

    def _rounds(self, condition: Node | None, body: Node, step: Node | None, control_inside: int) -> None:
        """Goes round until nothing depends on more than before."""
        frame = self._frames[-1]
        control, outer_left = self._control, frame.loop_left
        while True:
            before, left_before = dict(self._values), (frame.left, frame.loop_left)
            self._control = control_inside
            if condition is not None:
                self._control |= self._evaluate(condition).depends
            self._statement(body)
            if step is not None:
                self._evaluate(step)
            after = self._values
            head = {name: in_a_loop(value, after[name]) for name, value in before.items()}
            settled = all(head[name].depends == value.depends for name, value in before.items())
            self._values = {**after, **head}
            if settled and left_before == (frame.left, frame.loop_left):
                break
        for name, value in before.items():  # behind the loop, the model takes what one round left
            if after[name].lanes is not None and after[name].lanes != value.lanes:
                sample = Lanes(after[name].lanes.values, max(after[name].lanes.kind, SAMPLE))
                self._values[name] = replace(head[name], lanes=sample)
        self._control, frame.loop_left = control, outer_left

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
        if kind == "LValueToRValue" or kind in CASTS_THAT_KEEP:
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

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _get_CallExpr(self, node: Node) -> Value:
        arguments = children(node)[1:]
        function = self.tree.function(callee(node))
        return self._call_ours(function, arguments) if function else self._call_library(node, arguments)

    def _get_CXXMemberCallExpr(self, node: Node) -> Value:
        target = callee(node)
        function = self.tree.function(target)
        if function is None:
            return self._call_library(node, [*children(target), *children(node)[1:]])
        return self._call_ours(function, children(node)[1:], this=self._object(target))

    def _object(self, member: Node) -> Value:
        """What `this` is in a call by a MemberExpr."""
        inner = children(member)[0]
        return self._evaluate(inner) if member.get("isArrow") else self._reference(inner)

    def _get_CXXOperatorCallExpr(self, node: Node) -> Value:
        name, arguments = callee_name(node), children(node)[1:]
        function = self.tree.function(callee(node))
        if function is not None and function["kind"] == "CXXMethodDecl":
            return self._call_ours(function, arguments[1:], this=self._reference(arguments[0]))
        if function is not None:
            return self._call_ours(function, arguments)
        if name == "operator=":
            value = self._evaluate(arguments[1])
            self._store(arguments[0], self._place(arguments[0]), value)
            return value
        if name == "operator[]":
            return self._load(node, self._place(node))
        value = self._call_library(node, arguments)
        if name.endswith("=") and name not in ("operator==", "operator!=", "operator<=", "operator>="):
            self._store(arguments[0], self._place(arguments[0]), value)
        return value

    def _call_ours(self, function: Node, arguments: list[Node], this: Value | None = None) -> Value:
        values = []
        for parameter, argument in zip(parameters_of(function), arguments, strict=True):
            is_reference = "&" in type_of(parameter)
            values.append(self._reference(argument) if is_reference else self._evaluate(argument))
        for parameter, value in zip(parameters_of(function), values, strict=True):
            self._values[parameter["id"]] = value
            self._declared[parameter["id"]] = self._here()
        return self._call_body(function, this)

    def _call_library(self, node: Node, arguments: list[Node]) -> Value:
        name = callee_name(node)
        values = [self._evaluate(argument) for argument in arguments]
        depends = union(*values)
        if name == "threadgroup_barrier":
            self._meet(node, name, THREAD, "threads of a threadgroup")
        elif name.startswith(("simd_", "simdgroup_", "quad_")) or "simdgroup_matrix<" in type_of(node):
            self._meet(node, name, LANE, "lanes of a simdgroup")
        for value in values:
            if value.target is not None:  # the function may write it
                self._values[value.target.variable] = self._values[value.target.variable].with_depends(depends)
        if name.startswith(("simd_", "quad_")):
            return self._collective(name, values, depends)
        if name.startswith("atomic_"):
            return Value(depends | THREAD | RUN)
        return Value(depends, self._integer_function(name, values))

    def _collective(self, name: str, values: list[Value], depends: int) -> Value:
        if name.split("_", 1)[1] in REDUCTIONS or (name in SELECTIONS and not values[1].depends & LANE):
            return Value(depends & ~LANE if name.startswith("simd_") else depends)
        if "prefix" in name or name.endswith(("is_first", "shuffle", "broadcast")):
            return Value(depends | LANE)
        return Value(depends)

    @staticmethod
    def _integer_function(name: str, values: list[Value]) -> Lanes | None:
        if name not in ("min", "max") or len(values) != 2:
            return None
        a, b = values[0].lanes, values[1].lanes
        if a is None or b is None or OFFSET in (a.kind, b.kind):
            return None
        pick = min if name == "min" else max
        return Lanes(tuple(map(pick, a.values, b.values)), max(a.kind, b.kind))

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
        declaration = self._globals.get(identifier, node["referencedDecl"])
        if "&" in type_of(declaration) and (value.space or value.target):
            return self._pointed(value)
        return Place(identifier)

    def _declare_global(self, identifier: str) -> None:
        if identifier not in self._globals:  # a constant of the library
            self._values[identifier] = Value()
            return
        node = self._globals[identifier]
        control, self._control = self._control, 0
        self._frames.append(Frame(0))
        self._declare(node)
        self._frames.pop()
        self._control = control

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

    def _get_CXXThisExpr(self, node: Node) -> Value:
        this = self._frames[-1].this
        assert this is not None
        return this

    def _get_CXXDefaultArgExpr(self, node: Node) -> Value:
        return Value()

    def _element(self, node: Node, array: Value, index: Value, text: str) -> Place | Memory:
        if array.target is not None:
            return self._indexed(node, array.target, index)
        size = Lanes((self._pointee_size(text),) * 32, EXACT)
        lanes = combine("+", array.known(), combine("*", index.known(), size))
        return Memory(Value(union(array, index), lanes, space=array.space))

    def _indexed(self, node: Node, whole: Place, index: Value) -> Place:
        if index.depends & RUN:
            self._complain(node, "a per-thread array is indexed by a value that is not known when it is compiled")
        return replace(whole, is_part=True)

    def _pointed(self, pointer: Value) -> Place | Memory:
        return pointer.target if pointer.target is not None else Memory(pointer)

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
