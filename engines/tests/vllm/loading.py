"""Loads the model in a folder, the first argument, into a worker without an engine.

A line of the output has the bytes of mps that the model holds, the most that were held while it was loaded, and the
numbers that were made of packed bytes. A file, the second argument, gets the parameters of the first layer's experts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.decoded import measured
from tests.helpers.wide import save_experts


def load(model: str, experts: str) -> list[int]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from torch_gdn_engines.vllm.worker import MpsWorker

    options = EngineArgs(model=model, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
    config = options.create_engine_config()
    with TemporaryDirectory() as folder, set_current_vllm_config(config):
        method = (Path(folder) / "store").as_uri()
        worker = MpsWorker(
            vllm_config=config, local_rank=0, rank=0, distributed_init_method=method, is_driver_worker=True
        )
        worker.init_device()
        _, figures = measured(worker.load_model)
        save_experts(worker.get_model(), experts)
    return figures


if __name__ == "__main__":
    print(json.dumps(load(*sys.argv[1:])))
