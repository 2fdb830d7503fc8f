"""Records what is known about each op: how to draw its inputs, its exact answer, its bounds, what it refuses.

`registry` has the entry of an op and all entries, `inputs` draws tensors and moves calls between devices, `models` has
the sizes of published models. The entries are in `gdn`, `gradients`, `layers`, `decode`, `aura`, `attention`, `pages`,
`experts` and `quantized`. The check, the proofs, the benchmarks and the tests derive their cases from them.
"""

from torch_gdn_check.registry import attention, aura, decode, experts, gdn, gradients, layers, pages, quantized
from torch_gdn_check.registry.registry import REGISTRY, OpEntry, Point, complete

__all__ = [
    "REGISTRY",
    "OpEntry",
    "Point",
    "attention",
    "aura",
    "complete",
    "decode",
    "experts",
    "gdn",
    "gradients",
    "layers",
    "pages",
    "quantized",
]
