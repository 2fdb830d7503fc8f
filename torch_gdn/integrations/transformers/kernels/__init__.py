"""A local kernel, as Hugging Face's `kernels` reads this folder; `kernel_mapping()` names its layers."""

from . import layers

__all__ = ["layers"]
