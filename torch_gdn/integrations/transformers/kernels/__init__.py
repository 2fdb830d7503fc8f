"""A local kernel for Hugging Face's `kernels`, which reads this folder. `kernel_mapping()` names its layers."""

from . import layers

__all__ = ["layers"]
