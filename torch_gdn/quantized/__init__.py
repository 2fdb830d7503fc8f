"""Reads published weights of 4 and 8 bits, also FP8 and MXFP4, and converts them to the form that torch_gdn's ops take.

`PackedWeight` is that form. `from_gptq`, `from_awq`, `from_auto_round`, `from_compressed_tensors`, `from_float8`,
`from_mxfp4` and `from_mlx` make one from the tensors of a file. `configuration.read` says what the files of a model
hold. This package is plain PyTorch and knows no engine.
"""

from torch_gdn.quantized.compressed_tensors import from_compressed_tensors
from torch_gdn.quantized.floats import from_float8, from_mxfp4
from torch_gdn.quantized.gptq import from_auto_round, from_awq, from_gptq
from torch_gdn.quantized.mlx import from_mlx
from torch_gdn.quantized.packed_weight import PackedWeight, pack, stack, unpack

__all__ = [
    "PackedWeight",
    "from_auto_round",
    "from_awq",
    "from_compressed_tensors",
    "from_float8",
    "from_gptq",
    "from_mlx",
    "from_mxfp4",
    "pack",
    "stack",
    "unpack",
]
