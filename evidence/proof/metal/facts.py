"""Computes what a kernel variant needs: exact facts from clang's tree, and a model of what a compiler makes of it.

The model has these constants. A variable in scope takes one 32-bit register for each 4 bytes begun. A pointer to device
or constant memory takes two, and one to threadgroup memory takes one. References and compile-time constants take none.
What an expression holds between its parts is not counted, and nothing ends before its scope does. Threadgroup memory
has 32 banks of 4 bytes. An access is served 128 bytes at a time, and once for each different word of one bank among
them.

A thread has at most 128 registers of 32 bits, each two of 16, in the G13 of the M1 (the reverse-engineered description
at dougallj.github.io/applegpu/docs.html). For later GPUs no number is published. The model is no bound in either
direction: a compiler ends a variable with its last use and adds what expressions need. So a variant above 128 may fit,
and one below may not.
"""

from __future__ import annotations

from dataclasses import dataclass

from evidence.proof.metal.flow import Flow
from evidence.proof.metal.rules import Problem
from evidence.proof.metal.tree import (
    Kernel,
    Layout,
    Node,
    Tree,
    body_of,
    callee,
    callee_name,
    children,
    is_array,
    is_fragment,
    parameters_of,
    type_of,
    walk,
)

ISA_REGISTERS = 128
MAX_THREAD_BYTES = 4 * ISA_REGISTERS  # for arrays and fragments: every register of a thread
MAX_THREADGROUP_BYTES = 32768
MAX_BUFFERS = 31


@dataclass(frozen=True)
class Facts:
    name: str
    threadgroup_bytes: int
    buffers: int
    device_vector: int  # bytes of the widest vector loaded or stored at once, or 0; it must be aligned to them
    threadgroup_vector: int
    thread_bytes: int  # the most that live arrays and fragments take
    registers: int  # by the model
    bank_passes: int  # by the model, for the worst access to threadgroup memory
    bank_file: str
    written: frozenset[int] = frozenset()  # buffers that are not const

    COLUMNS = (
        "kernel variant",
        "threadgroup bytes",
        "buffers",
        "device vector bytes",
        "threadgroup vector bytes",
        "array and fragment bytes a thread",
        "registers (model)",
        "bank passes (model)",
        "worst in (model)",
    )

    def row(self) -> tuple[str, ...]:
        memory = (self.threadgroup_bytes, self.buffers, self.device_vector, self.threadgroup_vector)
        numbers = (*memory, self.thread_bytes, self.registers, self.bank_passes)
        return (self.name, *map(str, numbers), self.bank_file)

    def over_limit(self) -> list[str]:
        limits = (
            ("bytes of arrays and fragments a thread", self.thread_bytes, MAX_THREAD_BYTES),
            ("bytes of static threadgroup memory", self.threadgroup_bytes, MAX_THREADGROUP_BYTES),
            ("buffers", self.buffers, MAX_BUFFERS),
        )
        return [f"{self.name}: {has} {what}, the limit is {limit}" for what, has, limit in limits if has > limit]


def threadgroup_bytes(kernel: Kernel, layout: Layout) -> int:
    """Each array starts at a multiple of 16, which its largest vector may need."""
    calls = (node for node in walk(kernel.function) if node["kind"] == "CallExpr")
    sizes = [layout.size(type_of(call)) for call in calls if callee_name(call) == "threadgroup_variable"]
    return sum(-(-size // 16) * 16 for size in sizes)


def vector_bytes(functions: list[Node], layout: Layout, space: str) -> int:
    """Returns the bytes of the widest vector in memory of this kind that the functions touch."""
    widest = 0
    for node in (node for function in functions for node in walk(function)):
        is_access = node["kind"] == "ArraySubscriptExpr" or node.get("opcode") == "*"
        if is_access and space in type_of(node).split() and "vec<" in type_of(node):
            widest = max(widest, layout.size(type_of(node)))
    return widest


@dataclass(frozen=True)
class Use:
    thread_bytes: int = 0
    registers: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.thread_bytes + other.thread_bytes, self.registers + other.registers)

    def most(self, other: Use) -> Use:
        return Use(max(self.thread_bytes, other.thread_bytes), max(self.registers, other.registers))


class Peak:
    """The most that variables in scope take at any point, with calls inlined and dead branches ignored."""

    def __init__(self, tree: Tree, layout: Layout, reached: set[str]) -> None:
        self._tree, self._layout, self._reached = tree, layout, reached
        self._of_functions: dict[str, Use] = {}

    def peak_in(self, function: Node) -> Use:
        identifier = function["id"]
        if identifier not in self._of_functions:
            body = body_of(function)
            assert body is not None
            use = Use()
            for parameter in parameters_of(function):
                use += self._variable(parameter)
            self._of_functions[identifier] = use + self._of(body)
        return self._of_functions[identifier]

    def _variable(self, node: Node) -> Use:
        text = type_of(node).replace("__private", "").rstrip()
        if text.endswith("&") or node.get("constexpr"):
            return Use()
        if text.endswith("*"):
            return Use(registers=1 if "__global_device" in text or "__private" in type_of(node).split("*")[0] else 2)
        size = self._layout.size(text)
        counted = size if is_array(text) or is_fragment(text) else 0
        return Use(counted, -(-size // 4))

    def _of(self, node: Node) -> Use:
        """Finds a statement's peak. Its variables live until its scope ends, and those of its parts until these end."""
        live, peak = Use(), Use()
        for child in children(node):
            if child["kind"] == "DeclStmt":
                for variable in children(child):
                    if variable["id"] in self._reached:
                        peak = peak.most(live + self._of(variable))
                        live += self._variable(variable)
                peak = peak.most(live)
            else:
                peak = peak.most(live + self._of(child))
        if node["kind"] in ("CallExpr", "CXXMemberCallExpr", "CXXOperatorCallExpr"):
            function = self._tree.function(callee(node))
            if function is not None and function["id"] in self._reached:
                peak = peak.most(self.peak_in(function))
        return peak


def examine(tree: Tree, layout: Layout, kernel: Kernel) -> tuple[Facts, set[Problem]]:
    """Returns the facts of one kernel variant, and the rules that it breaks."""
    flow = Flow(tree, layout, kernel=kernel)
    flow.run()
    functions = [function for function in tree.functions.values() if function["id"] in flow.reached]
    use = Peak(tree, layout, flow.reached).peak_in(kernel.function)
    worst = max(flow.accesses.values(), key=lambda access: (access.passes, access.place), default=None)
    facts = Facts(
        name=kernel.name,
        threadgroup_bytes=threadgroup_bytes(kernel, layout),
        buffers=len(kernel.buffers()),
        device_vector=vector_bytes(functions, layout, "__local"),
        threadgroup_vector=vector_bytes(functions, layout, "__global_device"),
        thread_bytes=use.thread_bytes,
        registers=use.registers,
        bank_passes=worst.passes if worst else 1,
        bank_file=worst.place.split(":")[0] if worst and worst.passes > 1 else "-",
        written=frozenset(i for i, each in enumerate(kernel.buffers()) if not type_of(each).startswith("const ")),
    )
    return facts, flow.problems
