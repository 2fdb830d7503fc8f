"""The ops in plain PyTorch, to read and to compare with: any float dtype up to float64, any device.

Each takes the arguments of the op of its name. They compute in float32 or, for float64 inputs, in float64. The tests
compare every kernel with `fused_recurrent_gated_delta_rule` on float64 inputs. The formulas are those of Gated DeltaNet
(Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024), and for `aura_*` those of TurboQuant (Zandieh, Daliri, Hadian,
Mirrokni 2025) with norms corrected and attention in the rotated space.
"""

from torch_gdn.reference import attention, aura, experts, gdn, gradients, kda, layers, quantized, stages
from torch_gdn.reference.attention import *
from torch_gdn.reference.aura import *
from torch_gdn.reference.experts import *
from torch_gdn.reference.gdn import *
from torch_gdn.reference.gradients import *
from torch_gdn.reference.kda import *
from torch_gdn.reference.layers import *
from torch_gdn.reference.quantized import *
from torch_gdn.reference.stages import *

__all__ = []
__all__ += attention.__all__
__all__ += aura.__all__
__all__ += experts.__all__
__all__ += gdn.__all__
__all__ += gradients.__all__
__all__ += kda.__all__
__all__ += layers.__all__
__all__ += quantized.__all__
__all__ += stages.__all__
