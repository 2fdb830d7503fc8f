"""On the path of an engine's processes: where SIMULATED_MPS is set, device "mps" is the simulated one in each."""

import importlib.util
import os

import torch


def define_operators_of_torchvision() -> None:
    """PyPI's torchvision for Linux is built for CUDA. Its operators do not load with a torch without CUDA, and it
    cannot be imported without two declarations. vLLM's file of Qwen3.5 imports it, but nothing here calls the
    operators."""
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.torchvision_operators = library  # kept for as long as the process


if os.environ.get("ENGINE_TESTS"):
    define_operators_of_torchvision()
if os.environ.get("SIMULATED_MPS"):
    import mps_simulator

    mps_simulator.activate()
