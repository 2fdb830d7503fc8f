"""The ways in which Metal goes through a prompt: each of them, and which is taken."""

from __future__ import annotations

import pytest

from tests.helpers.cases import assert_exact, make_case, run
from tests.helpers.devices import ready
from torch_gdn import _C
from torch_gdn.tune import prefill_way

OP = "chunk_gated_delta_rule"
each_way = pytest.mark.parametrize("way", _C.prefill_way_names())


@each_way
def test_a_forced_way_is_taken(way: str) -> None:
    """`run` sees the kernels of that way run."""
    case = make_case(70, 32, 16)
    with prefill_way(way):
        assert_exact(OP, case, run(OP, case, ready("mps")))


def test_a_way_is_forced_until_the_end_of_its_block() -> None:
    with prefill_way("staged"):
        with prefill_way("sequential"):
            assert _C.forced_prefill_way() == "sequential"
        assert _C.forced_prefill_way() == "staged"
        with prefill_way(None):
            assert _C.forced_prefill_way() is None
    with pytest.raises(KeyError), prefill_way("staged"):
        raise KeyError
    assert _C.forced_prefill_way() is None


def test_an_unknown_way_is_refused() -> None:
    words = r"expected one of 'staged', 'fused', 'sequential' or None, got 'quick'"
    with pytest.raises(ValueError, match=words), prefill_way("quick"):
        pass
