"""Lets torchvision be imported with a PyTorch that its library does not fit.

PyPI's torchvision for Linux is built for CUDA. With PyTorch's CPU build its library does not load, and its Python
files then fail: "operator torchvision::nms does not exist". vLLM and SGLang import them for Qwen3.5's images, and call
none of these operators. This file imports nothing of torch_gdn.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARIES: list[torch.library.Library] = []  # they live as long as the process


def declare() -> None:
    """Declares the two operators that torchvision's files need, without code, if its library does not load."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or LIBRARIES or torch.version.cuda is not None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except (OSError, RuntimeError):
        LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
