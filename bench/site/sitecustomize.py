"""On the path of the measured servers: lets vLLM import torchvision without torch_gdn's plugin too."""

import runpy
from pathlib import Path

OPERATORS = runpy.run_path(
    str(Path(__file__).parents[2] / "engines" / "torch_gdn_engines" / "torchvision_operators.py")
)
OPERATORS["declare"]()
