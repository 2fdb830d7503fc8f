"""Tests that a class with an option which torch_gdn's form ignores is refused, for each form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_gdn.integrations.transformers import attention, decoder_layers, experts, known_forms, norms, patches

MODULES = {kind: patches.modeling_module(kind) for kind in ("qwen3_next", "kimi_linear", "lara_mini")}
QWEN: Any = MODULES["qwen3_next"]
patches.learn(QWEN)
needs_forms = pytest.mark.skipif(
    not hasattr(QWEN.ALL_ATTENTION_FUNCTIONS, "get_interface"), reason="this version's own classes have another form"
)


def test_an_mlp() -> None:
    class ScaledMLP(QWEN.Qwen3NextMLP):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
            super().__init__(config, intermediate_size)
            self.limit = getattr(config, "swiglu_limit", None)

        def forward(self, x: Tensor) -> Tensor:
            gate = self.act_fn(self.gate_proj(x))
            return self.down_proj((gate if self.limit is None else gate.clamp(max=self.limit)) * self.up_proj(x))

    assert decoder_layers.is_known_mlp(QWEN.Qwen3NextMLP) and not decoder_layers.is_known_mlp(ScaledMLP)


def test_a_norm() -> None:
    class OffsetRMSNorm(QWEN.Qwen3NextRMSNorm):  # type: ignore[misc, name-defined]
        def __init__(self, dim: int, eps: float = 1e-6, offset: float = 0.0) -> None:
            super().__init__(dim, eps)
            self.offset = offset

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.offset

    assert norms.find_form(QWEN.Qwen3NextRMSNorm) is not None and norms.find_form(OffsetRMSNorm) is None
    assert norms.find_form(lambda size: nn.Identity()) is None


def test_a_gated_norm() -> None:
    class EarlyRMSNormGated(QWEN.Qwen3NextRMSNormGated):  # type: ignore[misc, name-defined]
        def __init__(self, hidden_size: int, eps: float = 1e-6, norm_before_gate: bool = True) -> None:
            super().__init__(hidden_size, eps)
            self.late = norm_before_gate

        def forward(self, hidden_states: Tensor, gate: Any = None) -> Tensor:
            if self.late:
                return super().forward(hidden_states, gate)
            return super().forward(hidden_states * nn.functional.silu(gate), torch.ones_like(gate))

    assert norms.is_gated(QWEN.Qwen3NextRMSNormGated) and not norms.is_gated(EarlyRMSNormGated)


@needs_forms
@pytest.mark.parametrize("option", ["softcap", "sliding_window", "scaling"])
def test_attention(option: str) -> None:
    """The option is passed to the attention function, or changes what is."""

    class OptionAttention(QWEN.Qwen3NextAttention):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.value = getattr(config, "an_option", None)

        def forward(
            self,
            hidden_states: Tensor,
            position_embeddings: Any,
            attention_mask: Any = None,
            past_key_values: Any = None,
            cache: Any = None,
            **kwargs: Any,
        ) -> Any:
            given = {"past_key_values": past_key_values, "cache": cache}
            cache_arguments = {name: value for name, value in given.items() if name == attention.CACHE_NAMES.model}
            if self.value is not None and option == "scaling":
                hidden_states = hidden_states * self.value
            elif self.value is not None:
                kwargs |= {option: self.value}
            return super().forward(hidden_states, position_embeddings, attention_mask, **cache_arguments, **kwargs)

    for owner in (QWEN.Qwen3NextAttention, OptionAttention):
        attention.modules[owner] = QWEN
    assert attention.is_known(QWEN.Qwen3NextAttention) and not attention.is_known(OptionAttention)


@needs_forms
def test_attention_that_tells_the_cache_something_else() -> None:
    class TellingAttention(QWEN.Qwen3NextAttention):  # type: ignore[misc, name-defined]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            cache = kwargs.get(attention.CACHE_NAMES.model)
            result = super().forward(hidden_states, **kwargs)
            if cache is not None:
                cache.layers[0].keys[:, :, -1] *= 2
            return result

    attention.modules[TellingAttention] = QWEN
    assert not attention.is_known(TellingAttention)


@pytest.mark.skipif(MODULES["lara_mini"] is None, reason="this version has no attention without a gate")
@pytest.mark.parametrize("change", ["its window", "no rotation"])
def test_attention_without_a_gate(change: str) -> None:
    lara: Any = MODULES["lara_mini"]

    class OtherAttention(lara.LaraMiniAttention):  # type: ignore[misc, name-defined]
        def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
            if change == "its window":
                kwargs |= {"window": self.sliding_window}
            elif position_embeddings is None:
                hidden_states = 2 * hidden_states
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)

    patches.learn(lara)
    for owner in (lara.LaraMiniAttention, OtherAttention):
        attention.modules[owner] = lara
    assert attention.is_known(lara.LaraMiniAttention) and not attention.is_known(OtherAttention)


@needs_forms
def test_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = QWEN.apply_rotary_pos_emb
    assert attention.has_known_rotation(QWEN)
    monkeypatch.setattr(QWEN, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: rotate(q, k, sin, cos))
    assert not attention.has_known_rotation(QWEN)


@needs_forms
def test_a_decoder_layer() -> None:
    class ScaledDecoderLayer(QWEN.Qwen3NextDecoderLayer):  # type: ignore[misc, name-defined]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return super().forward(hidden_states, **kwargs) * getattr(self, "residual_multiplier", 1.0)

    norm = QWEN.Qwen3NextRMSNorm
    assert decoder_layers.is_known(QWEN.Qwen3NextDecoderLayer, norm)
    assert not decoder_layers.is_known(ScaledDecoderLayer, norm)


@needs_forms
def test_a_block_of_experts() -> None:
    class ScaledSparseMoeBlock(QWEN.Qwen3NextSparseMoeBlock):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = getattr(config, "routed_scaling_factor", None) or 1.0

        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * self.scale

    assert experts.has_known_block(QWEN.Qwen3NextSparseMoeBlock)
    assert not experts.has_known_block(ScaledSparseMoeBlock)


@pytest.mark.skipif(MODULES["kimi_linear"] is None, reason="this version has no block with groups")
def test_a_block_with_groups() -> None:
    kimi: Any = MODULES["kimi_linear"]

    class LimitedMoE(kimi.KimiLinearMoE):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.limit = getattr(config, "output_limit", None)

        def forward(self, hidden_states: Tensor) -> Tensor:
            result = super().forward(hidden_states)
            return result if self.limit is None else result.tanh() * self.limit

    assert experts.has_known_block(kimi.KimiLinearMoE) and not experts.has_known_block(LimitedMoE)


@pytest.mark.skipif(experts.interface() is None, reason="this version has no functions of experts")
def test_a_function_of_experts() -> None:
    functions = experts.interface()
    for name in experts.IMPLEMENTATIONS:
        own = functions[name]
        assert experts.is_known_function(own)

        def with_limit(self: Any, *args: Any, own: Any = own) -> Any:
            result = own(self, *args)
            return result if getattr(self, "limit", None) is None else result.clamp(max=self.limit)

        assert not experts.is_known_function(with_limit)


def test_results_of_another_structure_differ() -> None:
    x = torch.randn(2, 3)
    assert known_forms.is_close((x, None), (x.clone(), None))
    for other in (x, (x, x), (x,), [x, None], (x.double(), None), (x + 1e-3, None), None):
        assert not known_forms.is_close(other, (x, None))


@pytest.mark.skipif(experts.interface() is None, reason="this version has no functions of experts")
def test_a_class_is_taken_although_enable_is_called_in_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert all(experts.is_known_function(experts.interface()[name]) for name in experts.IMPLEMENTATIONS)
        assert norms.find_form(QWEN.Qwen3NextRMSNorm) is not None


@pytest.mark.parametrize("error", [ImportError, OSError, NotImplementedError])
def test_a_class_that_cannot_be_built_is_left_to_transformers(error: type[Exception]) -> None:
    class Fused(nn.Module):
        """Needs a package or a file that is not here."""

        def __init__(self, config: Any) -> None:
            raise error("no fused_mlp")

    assert not decoder_layers.is_known_mlp(Fused)
