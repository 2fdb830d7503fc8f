"""Lists all replacements in SGLang, and checks that each took effect.

SGLang's own registry of hooks replaces the functions. The registry logs a failed hook and continues, so a renamed
function would fail only in a request. The replacements are checked with the version below.
"""

from __future__ import annotations

import importlib.metadata
import logging
import pkgutil
import sys
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

CHECKED = "0.5.23"
WITH_VISION = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
UNSUPPORTED = (
    "speculative_algorithm",
    "enable_deterministic_inference",
    "enable_linear_replayssm",
    "enable_page_major_kv_layout",
    "enable_unified_memory",  # sets the layout
)
OPS = "sglang.kernels.ops."
LAYERS = "sglang.srt.layers."
LOADER = "sglang.srt.model_loader.loader."


def require_checked_version() -> None:
    version = importlib.metadata.version("sglang")
    if version != CHECKED:
        raise SystemExit(
            f"torch_gdn's SGLang plugin was checked with SGLang {CHECKED}, not with {version}: install that version, "
            "or set TORCH_GDN_SGLANG=off"
        )


def replacements() -> dict[str, Any]:
    """Returns what replaces each function or class. These replacements never call SGLang's own."""
    from torch_gdn_engines.sglang import attention, kernels, sampling, tracking

    projections = OPS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat"
    convolution = OPS + "mamba.causal_conv1d_triton.causal_conv1d_"
    scatter = OPS + "mamba.mamba_state_scatter_triton.track_mamba_states_"
    grammar = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar"
    elementwise = OPS + "elementwise.elementwise.fused_"
    return {
        projections: kernels.split_by_key_head,
        projections + "_contiguous": kernels.split_contiguous,
        convolution + "fn": kernels.convolve_prompts,
        convolution + "update": kernels.convolve_tokens,
        OPS + "attention.linear.fused_gdn_gating.fused_gdn_gating": kernels.gating,
        LAYERS + "attention.linear.kernels.gdn_triton.TritonGDNKernel": delta_rule(),
        OPS + "attention.fla.fused_norm_gate.FusedRMSNormGated.forward": kernels.gated_norm,
        LAYERS + "layernorm.GemmaRMSNorm.forward_native": kernels.zero_centered_norm,
        elementwise + "sigmoid_mul": kernels.sigmoid_mul,
        elementwise + "gate_sigmoid_mul": kernels.gate_sigmoid_mul,
        elementwise + "gate_sigmoid_mul_add": kernels.gate_sigmoid_mul_add,
        LAYERS + "attention.torch_native_backend.TorchNativeAttnBackend": attention.PagedAttention,
        grammar + ".apply_vocab_mask": sampling.mask_tokens_of_grammar,
        grammar + "Backend.apply_vocab_mask": sampling.mask_tokens,
        LAYERS + "sampler.multinomial_with_seed": sampling.sample_by_seeds,
        LAYERS + "sampler.Sampler._sync_token_ids_across_tp": sampling.agree_on_tokens,
        scatter + "all_layers": tracking.track_all_layers,
        scatter + "if_needed": tracking.track_one_layer,
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer": supports_extra_buffer,
    }


def wrappers() -> dict[str, Any]:
    """Returns what wraps each function. A wrapper gets SGLang's function as its first argument."""
    from torch_gdn_engines.sglang import kernels, quantized, sampling, warmup

    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo."
    return {
        OPS + "attention.fla.layernorm_gated.RMSNorm.forward": kernels.gated_norm_or_plain,
        LAYERS + "moe.topk.fused_topk_native": kernels.router,
        LAYERS + "moe.fused_moe_native.moe_forward_native": kernels.experts,
        "sglang.srt.configs.model_config.ModelConfig.__init__": serve_text_part,
        "sglang.srt.configs.model_config._get_and_verify_dtype": keep_dtype,
        "sglang.srt.configs.mamba_utils.mamba2_state_dtype": state_dtypes,
        LAYERS + "sampler.top_k_top_p_min_p_sampling_from_probs_torch": sampling.sample_filtered,
        "torch.Tensor.record_stream": sampling.record_stream,
        batch + "from_schedule_batch": sampling.with_seeds,
        batch + "merge_batch": sampling.merge_seeds,
        "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs": warmup.then_compile,
        "sglang.srt.arg_groups.platform_hook.handle_mps_backends": validate_arguments,
        "sglang.srt.arg_groups.validation_hook.validate_mps_model_config": quantized.allow_packed_weights,
        LOADER + "_get_quantization_config": quantized.with_shapes,
        LOADER + "DefaultModelLoader._get_all_weights": quantized.without_ignored,
    }


def delta_rule() -> type:
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    from torch_gdn_engines.sglang.kernels import DeltaRule

    return type("DeltaRule", (DeltaRule, LinearAttnKernelBase), {})


def supports_extra_buffer() -> bool:
    return True


def keep_dtype(theirs: Any, config: Any, dtype: Any) -> torch.dtype:
    """Wraps the function that decides the model's dtype. SGLang makes its pools from the same configuration, which
    does not know the argument --dtype."""
    chosen: torch.dtype = theirs(config, dtype)
    if not isinstance(config, dict):
        config.torch_gdn_dtype = chosen
    return chosen


def state_dtypes(theirs: Any, config: Any = None) -> Any:
    """Gives the convolution's states the model's dtype. SGLang takes bfloat16 for every model."""
    from sglang.srt.configs.mamba_utils import Mamba2StateDType
    from sglang.srt.environ import envs

    dtypes = theirs(config)
    text_config = getattr(config, "text_config", config)
    chosen = getattr(text_config, "torch_gdn_dtype", None)
    if chosen is None or envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        return dtypes
    return Mamba2StateDType(conv=chosen, temporal=dtypes.temporal)


def serve_text_part(theirs: Any, config: Any, *others: Any, **options: Any) -> None:
    """Serves the text part of Qwen3.5. Its released checkpoints have a vision tower, which SGLang refuses on mps."""
    theirs(config, *others, **options)
    name = config.hf_config.architectures[0]
    if config.is_multimodal and name in WITH_VISION and options.get("enable_multimodal") is None:
        logger.warning("%s: torch_gdn's SGLang plugin serves only its text part on mps", name)
        theirs(config, *others, **{**options, "enable_multimodal": False})


def validate_arguments(theirs: Any, server_args: Any) -> None:
    """Refuses arguments that would otherwise fail in a request, before SGLang asserts what is true of CUDA alone."""
    from sglang.srt.arg_groups.overrides import resolving_view

    given = resolving_view(server_args)
    if given.device != "mps":
        raise ValueError(
            f"device: torch_gdn's SGLang plugin expected 'mps', got {given.device!r}: set TORCH_GDN_SGLANG=off for "
            "another device"
        )
    for name in UNSUPPORTED:
        value = getattr(given, name, None)
        if value:
            raise ValueError(f"{name}: torch_gdn's SGLang plugin does not support it on mps, got {value!r}")
    theirs(server_args)


def register() -> None:
    """Registers the hooks, and checks them once SGLang has applied those of all plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from torch_gdn_engines.sglang import quantized

    quantized.register()
    kinds = {HookType.REPLACE: replacements(), HookType.AROUND: wrappers()}
    targets = {target: hook for hooks in kinds.values() for target, hook in hooks.items()}
    originals = {target: resolved(target) for target in targets}
    for kind, hooks in kinds.items():
        for target, hook in hooks.items():
            HookRegistry.register(target, hook, kind)
    theirs = HookRegistry.apply_hooks

    def apply_hooks(cls: Any) -> None:
        theirs()
        wrong = {
            target: reason for target in targets if (reason := fault(HookRegistry, HookType, target, originals[target]))
        }
        if wrong:
            listed = "; ".join(f"{target} {reason}" for target, reason in wrong.items())
            raise SystemExit(f"torch_gdn's SGLang plugin did not take effect, so no engine is started: {listed}")

    HookRegistry.apply_hooks = classmethod(apply_hooks)


def resolved(target: str) -> Any:
    """Returns the function or method that a target names, or None if it does not exist."""
    try:
        value = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    return getattr(value, "__func__", value)


def fault(registry: Any, kinds: Any, target: str, original: Any) -> str | None:
    """Returns why the hook of a target did not take effect, or None if it did."""
    if original is None:
        return "does not exist"
    if resolved(target) is original:
        return "is still SGLang's"
    replacing = [source for kind, _, source in registry._hooks[target] if kind is kinds.REPLACE]
    if replacing and getattr(replacing[-1], "plugin_name", "torch_gdn") != "torch_gdn":
        return f"was replaced by the plugin {replacing[-1].plugin_name}"
    own = {target.rpartition(".")[0], "torch_gdn_engines.sglang.attention"}  # which has it as a base class
    holders = [name for name, module in list(sys.modules.items()) if name not in own and still_has(module, original)]
    return f"is still SGLang's in {', '.join(holders)}" if holders else None


def still_has(module: Any, original: Any) -> bool:
    return isinstance(module, ModuleType) and any(value is original for value in list(vars(module).values()))
