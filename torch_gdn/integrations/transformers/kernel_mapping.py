"""Maps functions and layers for Hugging Face's `kernels`, which puts the layers of a local folder into a model."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"
LAYERS = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "RMSNormGated",
)


def kernel_mapping() -> dict[str, dict[str, str]]:
    """Returns the mapping for transformers' `KernelConfig` with `use_local_kernel=True`: torch_gdn's layers on `mps`.

    It needs transformers 5.22 or later (earlier ones refuse `mps` or functions) and the version of `kernels` that it
    requires. It cannot be undone, and models of one kind share the functions that it changes.

    Returns:
        mapping: The device and "folder:layer" of each function and layer of the models.

    Example:
        >>> from torch_gdn.integrations.transformers import kernel_mapping
        >>> sorted(kernel_mapping()["causal_conv1d_fn"])
        ['mps']
    """
    return {layer: {"mps": f"{FOLDER}:{layer}"} for layer in LAYERS}
