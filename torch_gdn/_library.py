"""Loads the extension, which defines torch.ops.gdn.*: where its shaders are, what its ops return for fake tensors."""

from functools import partial
from pathlib import Path

import torch  # before the extension, which is linked against its libraries

REBUILD = "build torch_gdn for it: pip install . --no-build-isolation"
try:
    from torch_gdn import _C
except ImportError as error:
    raise ImportError(f"torch_gdn: its extension does not load with torch {torch.__version__}; {REBUILD}") from error


def check_torch(built_with: str, loaded: str) -> None:
    """Extension and PyTorch share C++ classes, whose layout changes between minor versions."""
    if built_with.split(".")[:2] != loaded.split(".")[:2]:
        raise ImportError(f"torch_gdn: expected torch {built_with}, which it was built with, got {loaded}; {REBUILD}")


def shader_directory() -> Path:
    """torch_gdn/shaders in an installed wheel, else shaders/ of the checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "shaders"
    return packaged if packaged.is_dir() else package.parent / "shaders"


check_torch(_C.built_with_torch, torch.__version__)
_C.set_shader_directory(str(shader_directory()))
for _op in _C.ops():
    torch.library.register_fake(f"gdn::{_op}", partial(_C.infer_outputs, _op))
