"""python -m torch_gdn.serve MODEL ...: `vllm serve` on mps; arguments are vLLM's."""

from __future__ import annotations

import os
import sys

import torch


def main() -> None:
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        print(f"{__doc__}\nTORCH_GDN_VLLM=cpu: on vLLM's CPU platform. `vllm serve --help` lists the arguments.")
        return
    device = os.environ.setdefault("TORCH_GDN_VLLM", "mps")
    if device == "mps" and not torch.backends.mps.is_available():
        sys.exit("torch_gdn.serve: this PyTorch has no mps device; TORCH_GDN_VLLM=cpu serves on the CPU")
    try:
        from vllm.entrypoints.cli.main import main as vllm
    except ImportError as error:
        sys.exit(
            f"torch_gdn.serve: vLLM is not installed here ({error}); torch_gdn's documentation, page vLLM, says how"
        )
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    vllm()


if __name__ == "__main__":
    main()
