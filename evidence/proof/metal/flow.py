"""Walks a kernel as its threads would, all at once, and follows what each value depends on (strict_values.py).

It finds barriers and simdgroup operations that some threads may not reach, and per-thread arrays with an index that is
known only when the kernel runs. For the model of bank conflicts, it notes each access to threadgroup memory. What it
does not know ends in an error, and not in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from evidence.proof.metal.evaluate import Evaluation
from evidence.proof.metal.tree import (
    Kernel,
    Node,
    body_of,
    callee,
    callee_name,
    children,
    is_array,
    name_in,
    parameters_of,
    type_of,
)
from evidence.proof.metal.values import (
    DIFFERS,
    EXACT,
    LANE,
    OFFSET,
    POSITION,
    RUN,
    SAMPLE,
    SIMDGROUP,
    SIZE,
    THREAD,
    UNBOUNDED,
    ZEROS,
    Lanes,
    NotUnderstood,
    Place,
    Value,
    Values,
    in_a_loop,
    join,
    merge,
    number,
    sampled,
    size_of_smaller,
    union,
)

BUILTINS = {
    "thread_index_in_simdgroup": Value(LANE | RUN, Lanes(tuple(range(32)), EXACT)),
    "thread_index_in_threadgroup": Value(THREAD | RUN, Lanes(tuple(range(32)), SAMPLE)),
    "simdgroup_index_in_threadgroup": Value(SIMDGROUP | RUN, Lanes(ZEROS, SAMPLE)),
    "thread_index_in_quadgroup": Value(LANE | RUN),
    "quadgroup_index_in_threadgroup": Value(THREAD | RUN),
    "thread_position_in_threadgroup": Value(THREAD | RUN),
    "thread_position_in_grid": Value(THREAD | RUN | POSITION),
}
ALIKE = Value(RUN | POSITION)  # sizes, and positions of the threadgroup, which its threads share

# Reductions give all lanes the same. Shuffles and broadcasts do if all ask for the same lane.
REDUCTIONS = ("sum", "product", "min", "max", "and", "or", "xor", "all", "any", "ballot", "broadcast_first")
SELECTIONS = ("simd_shuffle", "simd_broadcast", "quad_shuffle", "quad_broadcast")


@dataclass
class Frame:
    """A call in progress: the threads that are in it, and what made others leave."""

    entered: int  # what decided if it was called
    this: Value | None = None
    left: int = 0  # what decided if earlier returns were taken
    left_at: str = ""
    loop_left: int = 0  # what decided if the innermost loop, or its present round, was left
    # The values known at each of them:
    returned: list[Values] = field(default_factory=list)
    broken: list[Values] = field(default_factory=list)
    continued: list[Values] = field(default_factory=list)
    result: Value | None = None


@dataclass(kw_only=True)
class Flow(Evaluation):
    """Follows one kernel: call `run`, then read `problems` and `accesses`."""

    kernel: Kernel
    reached: set[str] = field(default_factory=set, init=False)  # ids of functions and variables outside dead branches
    _frames: list[Frame] = field(default_factory=list, init=False)

    def run(self) -> None:
        for node in self.tree.everything():
            if node["kind"] == "VarDecl":
                self._globals.setdefault(node["id"], node)
        for parameter in parameters_of(self.kernel.function):
            value = BUILTINS.get(self.kernel.builtins.get(parameter["id"], ""), ALIKE)
            space = self._space(type_of(parameter))
            self._values[parameter["id"]] = Value(value.depends & DIFFERS, space=space) if space else value
        self._call_body(self.kernel.function)

    # ---- control --------------------------------------------------------------------------------------------------

    def _here(self) -> int:
        """Returns the bits of what decides which threads run this."""
        frame = self._frames[-1]
        return self._control | frame.left | frame.loop_left

    def _meet(self, node: Node, name: str, deciding: int, who: str) -> None:
        """All of `who` must reach it. Complains if `deciding` tells some of them apart."""
        if not self._here() & deciding:
            return
        left = next((frame for frame in reversed(self._frames) if frame.left & deciding), None)
        why = f"after the return at {left.left_at}, which" if left else "under a condition that"
        self._complain(node, f"{name} {why} differs between {who}: not all of them reach it")

    def _call_body(self, function: Node, this: Value | None = None) -> Value:
        body = body_of(function)
        assert body is not None
        self.reached.add(function["id"])
        frame, control = Frame(self._here() if self._frames else 0, this), self._control
        self._control = frame.entered
        self._frames.append(frame)
        self._statement(body)
        self._frames.pop()
        self._values = merge([self._values, *frame.returned])
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
        for child in children(node):
            self._forget(child)

    def _forget(self, statement: Node) -> None:
        """Forgets the variables that the statement declares, whose scope has ended."""
        if statement["kind"] == "DeclStmt":
            for variable in children(statement):
                self._values.pop(variable.get("id", ""), None)

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
        self.reached.add(node["id"])
        self._declared[node["id"]] = self._here()
        self._rounds_at[node["id"]] = self._rounds_open
        if "&" in type_of(node) and initial:
            self._values[node["id"]] = self._reference(initial[0])
        elif initial:
            value = self._evaluate(initial[0])
            self._values[node["id"]] = replace(value, lanes=None) if is_array(type_of(node)) else value
        else:
            self._values[node["id"]] = Value()

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
        frame.returned.append(dict(self._values))

    def _do_BreakStmt(self, node: Node) -> None:
        self._frames[-1].loop_left |= self._control
        self._frames[-1].broken.append(dict(self._values))

    def _do_ContinueStmt(self, node: Node) -> None:
        self._frames[-1].loop_left |= self._control
        self._frames[-1].continued.append(dict(self._values))

    def _do_IfStmt(self, node: Node) -> None:
        parts = children(node)
        if node.get("hasVar"):
            raise NotUnderstood(f"{self.tree.places.of(node)}: a variable declared in a condition")
        condition = self._evaluate(parts[0])
        decided = condition.constant()
        if decided is not None:
            for branch in parts[1:2] if decided else parts[2:]:
                self._statement(branch)
            return
        branches = [partial(self._branch, branch) for branch in parts[1:]]
        self._each_branch(condition.depends, branches if len(branches) == 2 else [*branches, Value])

    def _branch(self, node: Node) -> Value:
        self._statement(node)
        return Value()

    def _do_ForStmt(self, node: Node) -> None:
        self._loop(node, is_unrolled=False)

    def _do_WhileStmt(self, node: Node) -> None:
        condition, body = children(node)
        self._rounds(condition, body, {}, is_unrolled=False)

    def _do_DoStmt(self, node: Node) -> None:
        body, condition = children(node)
        self._rounds(condition, body, {}, is_unrolled=False)

    def _loop(self, node: Node, is_unrolled: bool) -> None:
        first, _, condition, step, body = node["inner"]
        if first:
            self._statement(first)
        if is_unrolled:
            self._note_last_round(condition, step)
        self._rounds(condition, body, step, is_unrolled)
        if first:
            self._forget(first)

    def _note_last_round(self, condition: Node, step: Node) -> None:
        """Notes the last value of the counter of `for (int i = first; i < end; i += by)`, if it is known."""
        moved, sides = children(step), children(condition)
        past = {"<": 1, "<=": 0}.get(condition.get("opcode", ""))
        if past is None or not moved or name_in(sides[0]) != name_in(moved[0]):
            return
        counter, by = name_in(moved[0]), {"++": number(1), "+=": Value()}.get(step.get("opcode", ""))
        if by is None:
            return
        by = self._evaluate(moved[1]) if len(moved) > 1 else by
        first, end, apart = (x.constant() for x in (self._values[counter], self._evaluate(sides[1]), by))
        self._last.pop(counter, None)
        if first is not None and end is not None and apart:
            self._last[counter] = first + (end - past - first) // apart * apart

    def _rounds(self, condition: Node, body: Node, step: Node, is_unrolled: bool) -> None:
        """Repeats rounds until a round finds the same values at its head as the one before."""
        self._rounds_open += not is_unrolled
        frame, deciding = self._frames[-1], 0
        control, outer = self._control, (frame.loop_left, frame.broken, frame.continued)
        self._expect_steps(step)
        settled = False
        while not settled:
            head, at_head = self._values, (deciding, frame.left, frame.loop_left)
            self._values, frame.broken, frame.continued = dict(head), [], []
            self._control = control | deciding
            if condition:
                limit = self._evaluate(condition).depends
                deciding |= limit & DIFFERS | (UNBOUNDED if limit & (UNBOUNDED | POSITION) else 0)
                self._control |= deciding
            ends = [dict(self._values)] if condition else []
            self._statement(body)
            self._values = merge([self._values, *frame.continued])
            if step:
                self._evaluate(step)
            self._values = {name: in_a_loop(value, self._values[name]) for name, value in head.items()}
            settled = self._values == head and at_head == (deciding, frame.left, frame.loop_left)
        self._values = merge([*ends, *frame.broken] or [head])
        self._control = control
        frame.loop_left, frame.broken, frame.continued = outer
        self._rounds_open -= not is_unrolled

    def _expect_steps(self, step: Node) -> None:
        """Marks a loop's counter as differing from round to round, which saves a round."""
        counter = next(iter(children(step)), {}).get("referencedDecl", {}).get("id", "")
        if counter in self._values:
            self._values[counter] = sampled(self._values[counter])

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
        """Returns what `this` is in a call by a MemberExpr."""
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

    def _get_CXXThisExpr(self, node: Node) -> Value:
        this = self._frames[-1].this
        assert this is not None
        return this

    def _call_ours(self, function: Node, arguments: list[Node], this: Value | None = None) -> Value:
        values = []
        for parameter, argument in zip(parameters_of(function), arguments, strict=True):
            is_reference = "&" in type_of(parameter)
            values.append(self._reference(argument) if is_reference else self._evaluate(argument))
        for parameter, value in zip(parameters_of(function), values, strict=True):
            self._values[parameter["id"]] = value
            self._declared[parameter["id"]] = self._here()
            self._rounds_at[parameter["id"]] = self._rounds_open
        result = self._call_body(function, this)
        for parameter in parameters_of(function):
            del self._values[parameter["id"]]
        return result

    def _call_library(self, node: Node, arguments: list[Node]) -> Value:
        name = callee_name(node)
        values = [self._evaluate(argument) for argument in arguments]
        depends = union(*values, *(self._load(node, self._pointed(node, value)) for value in values if value.target))
        if any(value.space for value in values):
            depends |= RUN
        if name == "threadgroup_barrier":
            self._meet(node, name, THREAD, "threads of a threadgroup")
        elif name.startswith(("simd_", "simdgroup_", "quad_")) or "simdgroup_matrix<" in type_of(node):
            self._meet(node, name, LANE, "lanes of a simdgroup")
        written = depends | (LANE if name.startswith("simdgroup_") else 0)  # each lane gets its own part of a matrix
        for argument, value in zip(arguments, values, strict=True):
            target = self._pointed(node, value) if value.target else self._passed_by_reference(argument)
            if isinstance(target, Place):  # the function may write it
                self._store(node, replace(target, is_part=True), Value(written))
        if name.startswith(("simd_", "quad_")):
            return self._collective(name, values, depends)
        if name.startswith("atomic_"):
            return Value(depends | THREAD | RUN | UNBOUNDED)
        depends = depends & DIFFERS | self._size_of_function(name, values)
        return Value(depends, self._integer_function(name, values), space=self._space(type_of(node)))

    @staticmethod
    def _size_of_function(name: str, values: list[Value]) -> int:
        """Returns the bits that say how large the result may be."""
        if name == "min" and len(values) == 2:
            return size_of_smaller(values[0], values[1])
        return UNBOUNDED if name == "as_type" else union(*values) & SIZE

    def _passed_by_reference(self, argument: Node) -> Place | None:
        is_variable = argument.get("valueCategory") == "lvalue" and self._is_place(argument)
        if not is_variable or "const" in type_of(argument).split():
            return None
        place = self._place(argument)
        return place if isinstance(place, Place) else None

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
