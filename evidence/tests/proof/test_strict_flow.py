"""Tests which values differ between threads, and what that forbids. The rules on barriers use this analysis."""

from __future__ import annotations

import pytest

from evidence.proof.metal.kernels import check_source
from evidence.tests.proof.needs import needs_clang

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]

KERNEL = """
#include <metal_stdlib>
using namespace metal;
struct Place {{
  uint row, group;
}};
{before}
kernel void probe(device float* x [[buffer(0)]], constant uint& count [[buffer(1)]],
                  uint3 group [[threadgroup_position_in_grid]], uint3 position [[thread_position_in_threadgroup]],
                  uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                  uint simdgroup [[simdgroup_index_in_threadgroup]], uint3 size [[threads_per_threadgroup]]) {{
  threadgroup float shared_values[64];
  shared_values[index] = x[index + position.x + lane + simdgroup + count + group.x + size.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  {body}
  x[index] = shared_values[index];
}}
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def problems(body: str, before: str = "") -> list[str]:
    return check_source(KERNEL.format(body=body, before=before)).problems


ALIKE = {
    "a parameter": "if (count > 3) {}",
    "the threadgroup's position": "if (group.x == 0) {}",
    "the threadgroup's size": "if (size.x > 32) {}",
    "device memory at one place": "if (x[count] > 0) {}",
    "threadgroup memory at one place": "if (shared_values[3] > 0) {}",
    "a maximum of what lanes hold": "if (simd_max(lane) > 3) {}",
    "a value taken from one lane": "if (simd_shuffle(lane, ushort(3)) > 3) {}",
    "a member that does not differ": "Place p; p.row = index; p.group = group.x; if (p.group == 0) {}",
    "a member of a list that does not differ": "Place p{index, group.x}; if (p.group == 0) {}",
    "a loop that all go through alike": "for (uint i = 0; i < count; ++i) {}",
    "a constant": "if (sizeof(float) == 4) {}",
    "what was overwritten": "uint n = index; n = count; if (n > 0) {}",
}


@pytest.mark.parametrize("what", ALIKE)
def test_barrier_may_depend_on(what: str) -> None:
    assert problems(ALIKE[what].replace("{}", f"{{ {BARRIER} }}")) == []


DIFFERENT = {
    "the index in the threadgroup": "if (index > 0) {}",
    "the position in the threadgroup": "if (position.y > 0) {}",
    "the lane": "if (lane > 0) {}",
    "the simdgroup": "if (simdgroup > 0) {}",
    "device memory at each thread's place": "if (x[index] > 0) {}",
    "threadgroup memory at each thread's place": "if (shared_values[lane] > 0) {}",
    "a maximum within each simdgroup": "if (simd_max(index) > 3) {}",
    "a prefix sum": "if (simd_prefix_exclusive_sum(1) > 3) {}",
    "a shuffle by each lane's own number": "if (simd_shuffle(lane, ushort(lane ^ 1u)) > 3) {}",
    "a member that differs": "Place p; p.row = index; p.group = group.x; if (p.row == 0) {}",
    "a member of a list that differs": "Place p{index, group.x}; if (p.row == 0) {}",
    "a value set under a condition": "uint n = 0; if (index > 3) n = 1; if (n == 1) {}",
    "a value set in one branch": "uint n; if (lane > 3) n = 1; else n = 2; if (n == 1) {}",
    "how often each thread went round": "uint n = 0; for (uint i = index; i < count; i += 32) ++n; if (n > 1) {}",
    "the round in which it left": "uint n = 0; for (; n < 4; ++n) { if (x[index] > 0) break; } if (n > 1) {}",
    "a pointer to a value": "uint n = index; thread uint* p = &n; if (*p > 0) {}",
    "an element of an array": "uint n[2]; n[0] = index; n[1] = 0; if (n[0] > 0) {}",
    "a counter that others have raised": "if (atomic_fetch_add_explicit((device atomic_uint*)x, 1u, "
    "memory_order_relaxed) > 0) {}",
    "both of two conditions": "if (count > 3 && lane > 3) {}",
    "a choice": "if ((lane > 3 ? 1u : 0u) > 0) {}",
    "what only some lanes assign in a condition": "uint n = 0; const bool b = lane > 3 && (n = 1) > 0; if (n > 0) {} "
    "x[0] = float(b);",
    "what only some lanes assign in a choice": "uint n = 0; x[0] = float(lane > 3 ? (n = 1) : 2); if (n > 0) {}",
    "the member that another round set": "Place p; p.row = index; p.group = 0; for (uint i = 0; i < count; ++i) "
    "{ if (p.group > 0) {} p.group = index; }",
    "a pointer that moved": "float n[2]; n[0] = n[1] = x[index]; thread float* p = n; ++p; if (*p > 0) {}",
    "a pointer in an array": "uint n = index; thread uint* p[1]; p[0] = &n; if (*p[0] > 0) {}",
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("what", DIFFERENT)
def test_barrier_may_not_depend_on(what: str) -> None:
    result = problems(DIFFERENT[what].replace("{}", f"{{ {BARRIER} }}"))
    assert len(result) == 1 and "threadgroup_barrier under a condition that differs between threads" in result[0], (
        result
    )


IN_FUNCTIONS = {
    "returned": ("uint own(uint i) { return i + 1; }", "if (own(index) > 3) {}"),
    "returned on one of two ways": (
        "uint own(uint i) { if (i > 3) return 1; return 0; }",
        "if (own(index) == 1) {}",
    ),
    "written through a reference": (
        "void set(thread uint& n, uint i) { n = i; }",
        "uint n = 0; set(n, lane); if (n) {}",
    ),
    "written through a pointer": (
        "void set(thread uint* n, uint i) { *n = i; }",
        "uint n = 0; set(&n, lane); if (n) {}",
    ),
    "returned as a reference": (
        "thread uint& same(thread uint& n) { return n; }",
        "uint n = lane; if (same(n)) {}",
    ),
    "written through a returned reference": (
        "thread uint& same(thread uint& n) { return n; }",
        "uint n = 0; same(n) = lane; if (n) {}",
    ),
    "pointed to by a pointer that a function set": (
        "void aim(thread uint* thread& p, thread uint* q) { p = q; }",
        "uint n = 0, m = lane; thread uint* p = &n; aim(p, &m); if (*p) {}",
    ),
    "copied with the array that it is in": (
        "struct Held { uint n[2]; };",
        "Held a, b; a.n[0] = a.n[1] = lane; b.n[0] = b.n[1] = 0; b = a; if (b.n[1]) {}",
    ),
    "kept by a member function": (
        "struct Kept { uint n; void keep(uint i) { n = i; } };",
        "Kept kept; kept.n = 0; kept.keep(lane); if (kept.n > 3) {}",
    ),
}


@pytest.mark.parametrize("what", IN_FUNCTIONS)
def test_what_differs_is_followed_through_calls(what: str) -> None:
    before, body = IN_FUNCTIONS[what]
    assert len(problems(body.replace("{}", f"{{ {BARRIER} }}"), before)) == 1
    alike = body.replace("index", "count").replace("lane", "count")
    assert problems(alike.replace("{}", f"{{ {BARRIER} }}"), before) == []


def test_simdgroups_may_part_before_a_simdgroup_operation() -> None:
    assert problems("if (simdgroup == 1) shared_values[0] = simd_sum(1.0f);") == []
    assert len(problems("if (index < 40) shared_values[0] = simd_sum(1.0f);")) == 1


def test_a_barrier_of_a_simdgroup_asks_less_than_one_of_the_threadgroup() -> None:
    barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    assert problems(f"if (simdgroup == 1) {{ {barrier} }}") == []
    (problem,) = problems(f"if (lane == 1) {{ {barrier} }}")
    assert "simdgroup_barrier under a condition that differs between lanes of a simdgroup" in problem


def test_the_message_names_the_return() -> None:
    (problem,) = problems(f"if (index > 3) return;\n  {BARRIER}")
    assert problem == (
        "program:16: threadgroup_barrier after the return at program:15, which differs between threads of a "
        "threadgroup: not all of them reach it"
    )


def test_threads_meet_again_behind_a_function_that_some_left_early() -> None:
    before = "void touch(device float* x, uint i) { if (i > 3) return; x[i] = 1.0f; }"
    assert problems(f"touch(x, index); {BARRIER}", before) == []


# A loop, a jump or an overflow changes a number that was known before, so the branch is not dead.
ALIVE = {
    "a later round of an unrolled loop": "{unroll}for (int n = 0; n < 4; ++n) {{ if (n == 2) {{}} }}",
    "a later round of a loop": "for (uint n = 0; n < count; ++n) {{ if (n == 2) {{}} }}",
    "what an unrolled loop assigns": "uint n = 0; {unroll}for (int i = 0; i < 4; ++i) {{ if (n == 1) {{}} n = 1; }}",
    "a value at a break": "uint n = 0; for (uint i = 0; i < count; ++i) {{ n = 1; if (i == group.x) break; n = 0; }} "
    "if (n == 1) {{}}",
    "a value at a continue": "uint n = 0; for (uint i = 0; i < count; ++i) {{ n = 1; if (i == group.x) continue; "
    "n = 0; }} if (n == 1) {{}}",
    "a value at a return": "uint n = 0; set(n, count); if (n == 1) {{}}",
    "what a library function wrote": "int n = 0; x[0] = frexp(x[1], n); if (n > 0) {{}}",
    "unsigned numbers below zero": "uint n = 0; n = n - 1u; if (n > 5) {{}}",
    "a number too large for its type": "uchar n = 255; n += 1; if (n == 0) {{}}",
}


@pytest.mark.parametrize("what", ALIVE)
def test_a_branch_that_may_be_taken_is_looked_at(what: str) -> None:
    before = "void set(thread uint& n, uint c) { n = 1; if (c > 3) return; n = 0; }"
    body = ALIVE[what].format(unroll=UNROLL).replace("{}", f"{{ if (lane > 0) {{ {BARRIER} }} }}")
    (problem,) = problems(body, before)
    assert "threadgroup_barrier under a condition that differs between threads" in problem


def test_dead_code_is_not_looked_at() -> None:
    assert problems(f"if (sizeof(float) == 8) {{ if (index > 3) {{ {BARRIER} }} }}") == []


UNROLL = '_Pragma("clang loop unroll(full)") '
ARRAY = "float a[4]; a[0] = a[1] = a[2] = a[3] = 0.0f; "


@pytest.mark.parametrize("index", ["0", "i", "3 - i", "(i + 1) % 4", "i / 2 + 1"])
def test_array_may_be_indexed_by_what_is_known_when_compiled(index: str) -> None:
    assert problems(f"{ARRAY}{UNROLL}for (int i = 0; i < 4; ++i) a[{index}] += 1.0f; x[0] = a[1];") == []


@pytest.mark.parametrize("index", ["lane % 4", "count % 4", "group.x % 4", "uint(x[0]) % 4"])
def test_array_may_not_be_indexed_by_what_is_known_when_run(index: str) -> None:
    (problem,) = problems(f"{ARRAY} x[0] = a[{index}];")
    assert "indexed by a value that is not known when it is compiled" in problem


@pytest.mark.parametrize("use", ["x[0] = *p;", "x[0] = p[0];", "*p = x[0];"])
def test_a_pointer_into_an_array_may_not_move_by_what_is_known_when_run(use: str) -> None:
    (problem,) = problems(f"{ARRAY} thread float* p = a; if (lane > 3) p = p + 1; {use} x[1] = a[1];")
    assert "indexed by a value that is not known when it is compiled" in problem


def test_a_loop_that_is_not_unrolled_makes_its_counter_unknown() -> None:
    (problem,) = problems(f"{ARRAY}for (int i = 0; i < 4; ++i) a[i] += 1.0f; x[0] = a[1];")
    assert "indexed by a value that is not known when it is compiled" in problem


def test_what_the_analysis_does_not_know_is_a_problem() -> None:
    (problem,) = problems("switch (count) { case 1: x[0] = 1.0f; break; default: x[0] = 2.0f; }")
    assert problem == "probe: program:15: a SwitchStmt: the checks have no rule for it"


def test_what_a_library_function_writes_through_a_reference_is_followed() -> None:
    body = f"float whole; const float part = modf(x[index], whole); if (whole > 0.0f) {{ {BARRIER} }} x[0] = part;"
    assert len(problems(body)) == 1
    assert problems(body.replace("index", "count")) == []


def test_each_lane_holds_its_own_part_of_a_matrix() -> None:
    body = "simdgroup_float8x8 m; simdgroup_load(m, x, 8); if (m.thread_elements()[0] > 0.0f) x[0] = simd_sum(1.0f);"
    (problem,) = problems(body, "#include <metal_simdgroup_matrix>")
    assert "simd_sum under a condition that differs between lanes" in problem


def test_a_condition_is_asked_again_only_by_those_that_went_round() -> None:
    assert len(problems("uint n = 0; while (lane + simd_sum(1u) > n) ++n; x[0] = float(n);")) == 1
    assert problems("uint n = 0; while (count + simd_sum(1u) > n) ++n; x[0] = float(n);") == []


def test_a_function_may_be_given_one_array_and_then_another() -> None:
    before = f"void fill(thread float* a, float v) {{ {UNROLL}for (int i = 0; i < 2; ++i) a[i] = v; }}"
    body = "float a[2], b[2]; for (uint n = 0; n < count; ++n) { fill(a, x[n]); fill(b, x[n]); } x[0] = a[0] + b[0];"
    assert problems(body, before) == []


@pytest.mark.parametrize(
    "change",
    [
        "if (count > 3) p = b;",
        "for (uint n = 0; n < count; ++n) { p[0] += 1.0f; p = b; }",
        "p = count > 3 ? p : b;",
        "thread float* both[2]; both[0] = a; both[1] = b; p = both[0];",
    ],
)
def test_a_pointer_to_either_of_two_arrays_may_not_be_used(change: str) -> None:
    body = f"float a[2], b[2]; a[0] = b[0] = x[0]; thread float* p = a; {change}"
    (problem,) = problems(f"{body} x[0] = p[0] + b[0];")
    assert "a pointer to either of two variables: the checks have no rule for it" in problem
    assert problems(f"{body} p = a; x[0] = p[0] + b[0];".replace("p[0] += 1.0f;", "")) == []


LISTS = """
struct Rows {
  device float* first;
};
struct Both {
  uint count;
  Rows rows;
};
METAL_FUNC float element_of(Both both) { return both.rows.first[both.count]; }
"""


def test_pointers_are_followed_through_lists() -> None:
    body = "Both both{0, {x}}; both.rows = {x + count}; x[0] = element_of(both) + element_of({1, {x}});"
    assert problems(body, LISTS) == []


def test_a_pointer_that_the_analysis_lost_may_not_be_used() -> None:
    body = "float a[1]; a[0] = x[0]; Held held[1] = {{a, 1}}; x[0] = *held[0].p + float(held[0].n);"
    (problem,) = problems(body, "struct Held { thread float* p; int n; };")
    assert problem == "probe: program:15: a pointer to an unknown place: the checks have no rule for it"


@pytest.mark.parametrize(
    ("loop", "last"), [("i = 0; i <= 4; ++i", 4), ("i = 1; i < 7; i += 3", 4), ("i = 0; i < 6; ++i", 5)]
)
def test_the_last_round_of_a_loop_stays_in_its_array(loop: str, last: int) -> None:
    """The simulated device takes the index after the last of an array of vectors."""
    body = f"float2 a[4]; a[1] = 0.0f; {UNROLL}for (int {loop}) a[i] = 1.0f; x[0] = a[1].x;"
    (problem,) = problems(body)
    assert f"the last round of a loop uses element {last} of an array of 4" in problem
    assert problems(body.replace("a[4]", f"a[{last + 1}]")) == []
