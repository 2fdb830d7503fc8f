"""Tests that evidence/proof/metal/vocabulary.tsv has every word of Metal in the shaders, with a source known to
compile.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.proof.metal import vocabulary
from evidence.proof.metal.tree import Tree
from evidence.proof.metal.vocabulary import Word
from evidence.proof.reasons import Unavailable
from evidence.tests.proof.needs import needs_clang
from torch_gdn._recorder import KernelVariant

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]
needs_every_kernel = pytest.mark.sweep(1, seeds=4)  # this parses all kernels, which takes 15 seconds


@pytest.fixture(scope="module")
def trees() -> list[Tree]:
    return vocabulary.trees_of_kernels()


@pytest.fixture(scope="module")
def words(trees: list[Tree]) -> set[Word]:
    return vocabulary.words(trees)


@pytest.fixture(scope="module")
def projects() -> list[vocabulary.Project]:
    try:
        return vocabulary.projects()
    except Unavailable as reason:
        pytest.skip(str(reason))


@needs_every_kernel
def test_the_table_has_every_word_and_no_other(words: set[Word]) -> None:
    assert words == vocabulary.read_table().keys(), "python -m evidence.proof --only vocabulary --write"


def test_every_word_has_a_source() -> None:
    assert all(all(files) for files in vocabulary.read_table().values())


def test_the_sources_have_the_words(projects: list[vocabulary.Project]) -> None:
    table = vocabulary.read_table()
    assert vocabulary.sources(table, projects) == table, "python -m evidence.proof --only vocabulary --write"


@needs_every_kernel
def test_words_of_each_kind_are_seen(words: set[Word]) -> None:
    expected = {
        Word("header", "metal_stdlib"),
        Word("attribute", "buffer"),
        Word("attribute", "thread_index_in_simdgroup"),
        Word("attribute", "host_name"),
        Word("pragma", "clang loop unroll(full)"),
        Word("function", "simd_sum"),
        Word("function", "thread_elements"),
        Word("name", "simdgroup_float8x8"),
        Word("name", "threadgroup"),
        Word("name", "bfloat"),
    }
    assert expected <= words


@needs_every_kernel
def test_our_own_names_are_no_words(words: set[Word]) -> None:
    own = {"UNROLL", "load_even_fragment", "chunk_fwd_h", "kStride", "LanePosition", "tokens", "T", "C", "ErrorLog"}
    assert not own & {word.text for word in words}


@needs_every_kernel
def test_a_new_word_is_not_in_the_table(
    trees: list[Tree], words: set[Word], monkeypatch: pytest.MonkeyPatch, shaders: Path
) -> None:
    solve = shaders / "gdn/solve_tril.metal"
    solve.write_text(solve.read_text().replace("0.0f;\n  }", "simd_product(0.0f);\n  }", 1))
    monkeypatch.setattr(vocabulary, "SHADERS", shaders)
    changed = vocabulary.trees_of([KernelVariant("solve_tril", "gdn/solve_tril.metal", ("64",))])
    new = vocabulary.words([*trees, *changed]) - words
    assert new == {Word("function", "simd_product")} and not new & vocabulary.read_table().keys()


def test_a_word_that_nobody_uses_has_no_source(projects: list[vocabulary.Project]) -> None:
    word = Word("function", "simd_frobnicate")
    assert vocabulary.sources([word], projects) == {word: []}


@pytest.mark.parametrize(
    ("word", "text", "found"),
    [
        (Word("function", "simd_sum"), "x = simd_sum(y);", True),
        (Word("function", "simd_sum"), "simd_sum<float>(y)", True),
        (Word("function", "simd_sum"), "using simd_sum;", False),
        (Word("function", "sum"), "simd_sum(y)", False),
        (Word("attribute", "buffer"), "device T* x [[buffer(0)]]", True),
        (Word("attribute", "buffer"), "buffer(0)", False),
        (Word("header", "metal_math"), "#include <metal_math>", True),
        (Word("pragma", "clang loop unroll(full)"), '_Pragma("clang loop  unroll(full)")', True),
        (Word("name", "vec"), "vec<T, 4> v", True),
        (Word("name", "vec"), "vector v", False),
    ],
)
def test_what_counts_as_an_occurrence(word: Word, text: str, found: bool) -> None:
    assert bool(word.pattern().search(text)) == found


def test_comments_and_texts_are_not_read() -> None:
    assert vocabulary.blanked('a /* simd_sum( */ b // simd_max(\n"simd_min(" c').split() == ["a", "b", "c"]


def test_what_only_the_host_reads_is_left_out() -> None:
    text = "#ifdef __METAL__\ndevice\n#else\nhost\n#endif\nboth\n#ifndef __METAL__\nhost\n#endif\n"
    assert vocabulary.metal_blocks(text).split() == ["#ifdef", "__METAL__", "device", "both", "#ifndef", "__METAL__"]
