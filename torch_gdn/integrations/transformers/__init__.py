"""transformers' Gated DeltaNet models on torch_gdn's kernels.

    import torch_gdn.integrations.transformers
    torch_gdn.integrations.transformers.enable()

From then on the layers of Qwen3-Next, Qwen3.5, Qwen3.5-MoE, Lara-Mini, OLMo-Hybrid, Kimi Linear, Bailing-Hybrid and
GLM-5-Next, built before or after, call torch_gdn wherever `supports` says so, on `mps` and on `cpu`; any other call
goes to what transformers itself would have used, and the first one of its kind warns why. `status()` says what is
replaced and what was called; `disable()` restores everything.
Tested with transformers 4.57.6, 5.12.0, 5.16.0, 5.23.0 and 5.24.0.
"""

from torch_gdn.integrations.transformers.switch import Status, disable, enable, status, supports

__all__ = ["Status", "disable", "enable", "status", "supports"]
