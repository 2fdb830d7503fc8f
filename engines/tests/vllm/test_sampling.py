"""Tests that sampling compiles nothing with torch.compile, for which the first request would wait."""

from __future__ import annotations

import subprocess
import sys

from engines.tests.vllm.conftest import environment

RANKS = """
import torch
from torch._dynamo.utils import counters
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
current_platform.register_triton_kernel_overrides()  # as each worker does first
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner
with torch.inference_mode():
    logprobs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log()
    result = Sampler.gather_logprobs(logprobs, 2, torch.tensor([2, 3]))
    computed, one = torch.tensor([5], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    gpu_model_runner.update_num_computed_tokens_for_batch_change(computed, one, one - 1, one * 2, one, one)
print(result.selected_token_ranks.tolist(), computed.tolist(), counters["stats"]["unique_graphs"])
"""


def test_log_probabilities_and_drafts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANKS], env=environment("cpu"), capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-1:] == ["[2, 4] [7] 0"], done.stderr[-3000:]
