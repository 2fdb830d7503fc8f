"""Tests that kernel templates are found in programs, and that error texts are left out without moving a line."""

from __future__ import annotations

import pytest

from evidence.proof import dialects
from evidence.proof.metal.front_end import shader_text
from tests.helpers.shaders import shaders_of_ops

PROGRAM = """\
METAL_FUNC int append_text(device char* target, int length, int size, constant const char* text) {
  target[length] = 0;  // the first }
  return length;
}
METAL_FUNC void report_error(device ErrorLog* log, constant const OpName& op, constant const char* text, int64_t got) {
  const uint slot = atomic_fetch_add_explicit(&log->count, 1u, memory_order_relaxed);
  if (slot >= 30) return;
  append_text(message.function, 0, 128, op.text);
  append_text(message.text, 0, 250, text);
  log->messages[slot].line = line;
}
template <typename T, int K>
[[kernel]] void probe(
    device const T* input [[buffer(1)]],  // an input
    constant Block& sizes [[buffer(0)]],
    uint lane [[thread_index_in_simdgroup]]) {
  if (input[lane] < K) {
    report_error(
        log, sizes.op, "x: expected // more (than) K, got ", K > 0 ? int(K) : 0, __LINE__);
  }
}
void after() {}
"""


def test_a_kernel_is_found_with_its_parameters_and_body() -> None:
    text = dialects.without_comments(PROGRAM)
    kernel = dialects.find_kernel(text, "probe")
    assert kernel.template == (("typename", "T"), ("int", "K"))
    assert kernel.parameters == (
        dialects.Parameter("device const T*", "input", "buffer", 1),
        dialects.Parameter("constant Block&", "sizes", "buffer", 0),
        dialects.Parameter("uint", "lane", "thread_index_in_simdgroup", None),
    )
    assert [each.name for each in kernel.buffers] == ["sizes", "input"]
    assert [each.is_block for each in kernel.parameters] == [False, True, False]
    assert kernel.parameters[1].value_type == "Block"
    assert text[: kernel.begin].endswith("}\n")
    assert text[kernel.body : kernel.body_end].strip().startswith("if (input[lane]")
    assert text[kernel.body_end :].split() == ["}", "void", "after()", "{}"]


def test_template_arguments_become_declarations() -> None:
    kernel = dialects.find_kernel(PROGRAM, "probe")
    assert kernel.constants(["float", "128"]) == ["typedef float T;", "constexpr int K = 128;"]
    with pytest.raises(ValueError, match="probe takes 2 template arguments, got \\['float'\\]"):
        kernel.constants(["float"])


def test_template_arguments_left_out_are_the_defaults() -> None:
    kernel = dialects.find_kernel(PROGRAM.replace("int K>", "int K, int C = 64, bool Scores = false>"), "probe")
    first = ["typedef float T;", "constexpr int K = 128;"]
    assert kernel.constants(["float", "128"]) == [*first, "constexpr int C = 64;", "constexpr bool Scores = false;"]
    assert kernel.constants(["float", "128", "8"])[2:] == ["constexpr int C = 8;", "constexpr bool Scores = false;"]
    assert kernel.constants(["float", "128", "8", "true"])[3:] == ["constexpr bool Scores = true;"]
    with pytest.raises(ValueError, match="probe takes 4 template arguments, got \\['float'\\]"):
        kernel.constants(["float"])


def test_comments_go_and_quoted_slashes_stay() -> None:
    text = dialects.without_comments(PROGRAM)
    assert "the first" not in text and "an input" not in text and "expected // more" in text


def test_reports_of_errors_keep_their_line_and_lose_their_texts() -> None:
    text = dialects.errors_by_line(dialects.without_comments(PROGRAM))
    lines = text.splitlines()
    assert len(lines) == len(PROGRAM.splitlines())
    assert lines[:4] == [""] * 4 and lines[4].startswith("METAL_FUNC void report_line(")
    assert "append_text" not in text and "expected" not in text
    assert lines[17].strip() == "report_line(log, __LINE__)"  # the line where the call began
    assert lines[20:] == ["}", "void after() {}"]


def test_a_program_without_the_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel other in a program of"):
        dialects.find_kernel(PROGRAM, "other")


@pytest.mark.parametrize("file", shaders_of_ops())
def test_every_shader_has_a_kernel_of_its_name_that_is_found(file: str) -> None:
    source = shader_text(file)
    text = dialects.errors_by_line(dialects.without_comments(source))
    assert text.count("\n") == source.count("\n")
    kernel = dialects.find_kernel(text, file.split("/")[-1].removesuffix(".metal"))
    assert sorted(each.binding or 0 for each in kernel.buffers) == list(range(len(kernel.buffers)))
    assert "report_error" not in text
