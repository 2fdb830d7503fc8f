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

from torch_gdn import _library, aura, ops, reference, self_test
from torch_gdn._recorder import recording
from torch_gdn._version import __version__
from torch_gdn.causal_conv1d_interface import causal_conv1d_fn
from torch_gdn.ops.attention import *
from torch_gdn.ops.aura import *
from torch_gdn.ops.convolutions import *
from torch_gdn.ops.experts import *
from torch_gdn.ops.gated_delta_rule import *
from torch_gdn.ops.kda import *
from torch_gdn.ops.layers import *
from torch_gdn.ops.quantized import *
from torch_gdn.ops.stages import *
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
    "aura",
    "causal_conv1d_fn",
    "prefill_algorithm",
    "recording",
    "reference",
    "warmup",
    *ops.attention.__all__,
    *ops.aura.__all__,
    *ops.convolutions.__all__,
    *ops.experts.__all__,
    *ops.gated_delta_rule.__all__,
    *ops.kda.__all__,
    *ops.layers.__all__,
    *ops.quantized.__all__,
    *ops.stages.__all__,
]

tuning_cache.install_file()
self_test.install()
del _library
