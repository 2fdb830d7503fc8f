"""Loads the extension, which defines torch.ops.gdn.*, and tells it where the shaders are."""

from pathlib import Path

import torch  # noqa: F401  before the extension, which is linked against its libraries

from torch_gdn import _C


def shader_directory() -> Path:
    """torch_gdn/shaders in an installed wheel, else shaders/ of the checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "shaders"
    return packaged if packaged.is_dir() else package.parent / "shaders"


_C.set_shader_directory(str(shader_directory()))
