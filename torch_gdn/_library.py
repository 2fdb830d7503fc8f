"""Loads the extension, which defines torch.ops.gdn.*: where its shaders are, what its ops return for fake tensors."""

from functools import partial
from pathlib import Path

import torch  # before the extension, which is linked against its libraries

from torch_gdn import _C


def shader_directory() -> Path:
    """torch_gdn/shaders in an installed wheel, else shaders/ of the checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "shaders"
    return packaged if packaged.is_dir() else package.parent / "shaders"


_C.set_shader_directory(str(shader_directory()))
for _op in _C.ops():
    torch.library.register_fake(f"gdn::{_op}", partial(_C.infer_outputs, _op))
