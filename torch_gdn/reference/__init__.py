"""The ops in plain PyTorch, to be read and to be compared with: any float dtype up to float64, any device.

Each takes the arguments of the op of its name. They compute in float32 or, for float64 inputs, in float64;
`fused_recurrent_gated_delta_rule` on float64 inputs is the oracle that the tests judge every kernel by. The formulas
are those of Gated DeltaNet (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024), and for `aura_*` those of
TurboQuant (Zandieh, Daliri, Hadian, Mirrokni 2025) with norms corrected and attention in the rotated space.
"""

from torch_gdn.reference.aura.aura_attention import aura_attention
from torch_gdn.reference.aura.aura_decode import aura_decode
from torch_gdn.reference.aura.aura_encode import aura_encode
from torch_gdn.reference.aura.aura_flash_p1 import aura_flash_p1
from torch_gdn.reference.aura.aura_flash_p2 import aura_flash_p2
from torch_gdn.reference.aura.aura_rotate import aura_rotate, aura_signs
from torch_gdn.reference.gdn.chunk_fwd_h import chunk_fwd_h
from torch_gdn.reference.gdn.chunk_fwd_o import chunk_fwd_o
from torch_gdn.reference.gdn.chunk_gated_delta_rule import chunk_gated_delta_rule
from torch_gdn.reference.gdn.chunk_local_cumsum import chunk_local_cumsum
from torch_gdn.reference.gdn.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt
from torch_gdn.reference.gdn.fused_recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule
from torch_gdn.reference.gdn.recompute_w_u import recompute_w_u
from torch_gdn.reference.gdn.solve_tril import solve_tril
from torch_gdn.reference.layers.causal_conv1d import causal_conv1d, causal_conv1d_update_
from torch_gdn.reference.layers.gdn_gating import gdn_gating
from torch_gdn.reference.layers.l2norm import l2norm
from torch_gdn.reference.layers.rms_norm_gated import rms_norm_gated

__all__ = [
    "aura_attention",
    "aura_decode",
    "aura_encode",
    "aura_flash_p1",
    "aura_flash_p2",
    "aura_rotate",
    "aura_signs",
    "causal_conv1d",
    "causal_conv1d_update_",
    "chunk_fwd_h",
    "chunk_fwd_o",
    "chunk_gated_delta_rule",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt",
    "fused_recurrent_gated_delta_rule",
    "gdn_gating",
    "l2norm",
    "recompute_w_u",
    "rms_norm_gated",
    "solve_tril",
]
