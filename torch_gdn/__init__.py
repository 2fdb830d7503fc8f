"""Gated DeltaNet kernels for PyTorch: Metal on `mps`, C++ on `cpu`.

Functions carry FLA's names and argument names; each is a thin layer over the op `torch.ops.gdn.<name>`, which
torch.compile takes without a graph break. Each raises a ValueError for a shape, size, option, device or index that its
docstring does not allow, and a TypeError for such a dtype. The delta rules, norms, gates, the short convolution and
quantized_linear have gradients. The others are forward only: under grad mode, an input that requires grad is a
RuntimeError.
"""

from typing import TYPE_CHECKING

from torch_gdn import command_line

if command_line.is_running():  # --help and wrong arguments end here, before PyTorch is imported
    command_line.check_arguments()

from torch_gdn import _library, aura, reference, self_test
from torch_gdn._recorder import recording
from torch_gdn._version import __version__
from torch_gdn.autograd import on_mps
from torch_gdn.causal_conv1d_interface import causal_conv1d_fn
from torch_gdn.ops.attention.compute_slot_mapping import compute_slot_mapping
from torch_gdn.ops.attention.paged_attention import paged_attention
from torch_gdn.ops.attention.qk_norm_rope_and_cache import qk_norm_rope_and_cache_
from torch_gdn.ops.attention.reshape_and_cache import reshape_and_cache
from torch_gdn.ops.aura.aura_attention import aura_attention
from torch_gdn.ops.aura.aura_decode import aura_decode
from torch_gdn.ops.aura.aura_encode import aura_encode, aura_encode_
from torch_gdn.ops.aura.aura_flash_p1 import aura_flash_p1
from torch_gdn.ops.aura.aura_flash_p2 import aura_flash_p2
from torch_gdn.ops.aura.aura_paged_attention import aura_paged_attention
from torch_gdn.ops.aura.aura_paged_tile_means import aura_paged_tile_means
from torch_gdn.ops.aura.aura_rotate import aura_rotate
from torch_gdn.ops.experts.moe_down import moe_down
from torch_gdn.ops.experts.moe_gate_up import moe_gate_up
from torch_gdn.ops.experts.moe_logits import moe_logits
from torch_gdn.ops.experts.moe_router import moe_router
from torch_gdn.ops.gdn.chunk_fwd_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from torch_gdn.ops.gdn.chunk_fwd_o import chunk_fwd_o
from torch_gdn.ops.gdn.chunk_gated_delta_rule import chunk_gated_delta_rule, chunk_gated_delta_rule_
from torch_gdn.ops.gdn.chunk_local_cumsum import chunk_local_cumsum
from torch_gdn.ops.gdn.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt, chunk_scaled_dot_kkt_fwd
from torch_gdn.ops.gdn.fused_recurrent_gated_delta_rule import (
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gated_delta_rule_,
)
from torch_gdn.ops.gdn.gdn_decode import gdn_decode_
from torch_gdn.ops.gdn.prepare_chunk_indices import prepare_chunk_indices
from torch_gdn.ops.gdn.prepare_chunk_offsets import prepare_chunk_offsets
from torch_gdn.ops.gdn.recompute_w_u import recompute_w_u, recompute_w_u_fwd
from torch_gdn.ops.gdn.solve_tril import solve_tril
from torch_gdn.ops.kda.chunk_kda import chunk_kda, chunk_kda_
from torch_gdn.ops.kda.fused_kda_gate import fused_kda_gate
from torch_gdn.ops.kda.fused_recurrent_kda import fused_recurrent_kda, fused_recurrent_kda_
from torch_gdn.ops.layers.act_and_mul import act_and_mul
from torch_gdn.ops.layers.batch_copy import batch_copy_
from torch_gdn.ops.layers.causal_conv1d import causal_conv1d
from torch_gdn.ops.layers.causal_conv1d_update import causal_conv1d_update, causal_conv1d_update_
from torch_gdn.ops.layers.copy_from_host import copy_from_host_
from torch_gdn.ops.layers.gdn_gating import fused_gdn_gate, gdn_gating
from torch_gdn.ops.layers.l2norm import l2norm, l2norm_fwd
from torch_gdn.ops.layers.qk_norm_rope import qk_norm_rope
from torch_gdn.ops.layers.rms_norm import rms_norm
from torch_gdn.ops.layers.rms_norm_gated import rms_norm_gated
from torch_gdn.ops.quantized.dequantize import dequantize
from torch_gdn.ops.quantized.quantized_linear import quantized_linear
from torch_gdn.tools import tuning_cache
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn.tools.warmup import warmup

if TYPE_CHECKING:
    from torch_gdn.integrations.transformers import disable as disable
    from torch_gdn.integrations.transformers import enable as enable
    from torch_gdn.integrations.transformers import status as status
    from torch_gdn.tools import tune as tune
else:  # hidden from type checkers, which would take every name for one of this module

    def __getattr__(name: str) -> object:
        """Imports a name on first use if its module imports torch_gdn itself."""
        from importlib import import_module

        if name == "tune":
            return import_module("torch_gdn.tools.tune")
        if name in ("disable", "enable", "status"):
            return getattr(import_module("torch_gdn.integrations.transformers"), name)
        raise AttributeError(f"module 'torch_gdn' has no attribute {name!r}")


__all__ = [
    "__version__",
    "act_and_mul",
    "aura",
    "aura_attention",
    "aura_decode",
    "aura_encode",
    "aura_encode_",
    "aura_flash_p1",
    "aura_flash_p2",
    "aura_paged_attention",
    "aura_paged_tile_means",
    "aura_rotate",
    "batch_copy_",
    "causal_conv1d",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_update_",
    "chunk_fwd_h",
    "chunk_fwd_o",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_kda",
    "chunk_kda_",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt",
    "chunk_scaled_dot_kkt_fwd",
    "compute_slot_mapping",
    "copy_from_host_",
    "dequantize",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_",
    "fused_recurrent_kda",
    "fused_recurrent_kda_",
    "gdn_decode_",
    "gdn_gating",
    "l2norm",
    "l2norm_fwd",
    "moe_down",
    "moe_gate_up",
    "moe_logits",
    "moe_router",
    "paged_attention",
    "prefill_algorithm",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "qk_norm_rope",
    "qk_norm_rope_and_cache_",
    "quantized_linear",
    "recompute_w_u",
    "recompute_w_u_fwd",
    "recording",
    "reference",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_gated",
    "solve_tril",
    "warmup",
]
tuning_cache.install_file()
self_test.install()
del _library, on_mps
