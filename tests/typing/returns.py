"""Calls as users write them, which mypy must accept. tests/tools/test_typing.py runs mypy on it, and nothing imports
it.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

import torch_gdn


def results_are_used_as_the_options_say(x: Tensor, wanted: bool) -> Tensor:
    o, state = torch_gdn.chunk_gated_delta_rule(x, x, x, g=x, beta=x, output_final_state=wanted)
    o, state, h = torch_gdn.chunk_kda(x, x, x, x, x, return_intermediate_states=True)
    served = torch_gdn.chunk_gated_delta_rule_(x, x, x, x, x, x, out=x)
    o, final = torch_gdn.fused_recurrent_gated_delta_rule(x, x, x, gk=x, output_final_state=True)
    assert_type(final, Tensor | None)
    return o + state + h + served.transpose(0, 1) + torch_gdn.rms_norm(x, x).sum()


def wrong_names_are_found(x: Tensor) -> None:
    torch_gdn.chunk_gated_delta_rule(x, x, x, x, x, chunk_sise=64)  # type: ignore[call-arg]
    torch_gdn.enabel()  # type: ignore[attr-defined]


def imported_when_first_used() -> None:
    assert_type(torch_gdn.enable(rollback=True).enabled, bool)
    assert_type(torch_gdn.disable().ran, dict[str, int])
    assert_type(torch_gdn.status().transformers, str)
    assert_type(torch_gdn.tools.tune.main([]), int)
