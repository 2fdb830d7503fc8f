"""The table of specialisations names what calls really launch."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.devices import on_a_mac, ready
from torch_gdn import _C, specialisations
from torch_gdn.check import seeded
from torch_gdn.specialisations import CHUNK_KERNELS, Variant
from torch_gdn.tune import prefill_algorithm

bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32


def launched(op: str, variant: Variant) -> set[str]:
    """The specialisations that the op runs for such a call."""
    import simulator

    device = ready("mps")
    case, options = seeded.inputs(op, variant, tokens=9)
    with simulator.profile() as profile:
        seeded.call(op, variant, case, options, device)
    return {name for name in profile.kernels if name.startswith(specialisations.KERNELS)}


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")
class TestAgainstTheHost:
    @pytest.mark.parametrize(
        "variant",
        [
            Variant(bfloat16, 40, 24),
            Variant(float32, 40, 25, chunk_size=16),
            Variant(float16, 33, 20, chunk_size=32),
            Variant(float32, 40, 24, chunk_size=16, aligned=False),
        ],
        ids=lambda variant: variant.name,
    )
    def test_chunk_kernels(self, variant: Variant) -> None:
        expected = {each.name for each in specialisations.of_variants([variant], CHUNK_KERNELS)}
        with prefill_algorithm("chunked"):
            assert launched("chunk_gated_delta_rule", variant) == expected

    @pytest.mark.parametrize(
        "variant",
        [
            Variant(bfloat16, 40, 24, normalise=True),
            Variant(float32, 72, 20),
            Variant(float16, 33, 20, value_inner=False),
            Variant(bfloat16, 40, 24, pool=bfloat16),
        ],
        ids=lambda variant: variant.name,
    )
    def test_the_fused_kernel(self, variant: Variant) -> None:
        expected = {each.name for each in specialisations.of_variants([variant], ("fused_chunk_gated_delta_rule",))}
        with prefill_algorithm("fused_chunk"):
            assert launched("chunk_gated_delta_rule", variant) == expected

    def test_the_norm(self) -> None:
        variant = Variant(float32, 40, 24, normalise=True)
        expected = {each.name for each in specialisations.of_variants([variant], (*CHUNK_KERNELS, "l2norm"))}
        with prefill_algorithm("chunked"):
            assert launched("chunk_gated_delta_rule", variant) == expected

    @pytest.mark.parametrize(
        "variant",
        [
            Variant(bfloat16, 40, 24),
            Variant(float32, 40, 24, value_inner=False, normalise=True),
            Variant(float32, 40, 24, channels=True),
            Variant(bfloat16, 40, 24, pool=bfloat16),
        ],
        ids=lambda variant: variant.name,
    )
    def test_the_recurrent_kernel(self, variant: Variant) -> None:
        kernel = "fused_recurrent_gated_delta_rule"
        assert launched(kernel, variant) == {each.name for each in specialisations.of_variants([variant], (kernel,))}


def test_one_is_compiled_without_a_call() -> None:
    ready("mps")
    (each,) = specialisations.of_variants([Variant(float32, 20, 20)], ["l2norm"])
    facts = _C.compile(each.kernel, each.file, list(each.arguments))
    assert facts["name"] == each.name == "l2norm_float_20"
    assert facts in _C.pipelines()


def test_an_error_of_the_compiler_comes_in_full() -> None:
    ready("mps")
    with pytest.raises(RuntimeError) as caught:
        _C.compile("solve_tril", "gdn/solve_tril.metal", ["65"])
    text = str(caught.value)
    assert "could not compile solve_tril_65" in text
    assert "gdn/solve_tril.metal:" in text and "a chunk has 16, 32 or 64 tokens" in text and "instantiation" in text


def test_every_model_and_every_dtype_is_in_the_table() -> None:
    covered = {(variant.dtype, variant.K, variant.V) for variant in specialisations.table()}
    for _, _, K, V in specialisations.MODELS.values():
        assert {(dtype, K, V) for dtype in specialisations.DTYPES} <= covered
