"""Lists the shaders that ops launch. The check itself launches those in check/torch_gdn_check/shaders."""

from __future__ import annotations

from torch_gdn._library import shader_directory


def shaders_of_ops() -> list[str]:
    """Returns shaders as launches name them: "gdn/solve_tril.metal"."""
    root = shader_directory()
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.metal") if path.parent.name != "probes")
