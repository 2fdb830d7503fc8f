"""Loads the model in a folder, the first argument, without an engine.

A line of the output has the bytes of mps that the model holds, the most that were held while it was loaded, and the
numbers that were made of packed bytes. A file, the second argument, gets the parameters of the first layer's experts.
"""

from __future__ import annotations

import json
import sys

from tests.helpers.decoded import measured
from tests.helpers.wide import save_experts


def load(model: str, experts: str) -> list[int]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(model_path=model, device="mps", dtype="bfloat16", skip_tokenizer_init=True)
    arguments.resolve_once()
    rank = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    one_batch.publish(arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    ports, config = PortArgs.init_new(arguments), one_batch.ModelConfig.from_server_args(arguments)
    one_batch.bootstrap.init_parallel_runtime(server_args=arguments, device="mps", dist_port=ports.nccl_port)
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    options = {"mem_fraction_static": 0.5, "gpu_id": 0, "nccl_port": ports.nccl_port, "server_args": arguments}
    runner, figures = measured(lambda: ModelRunner(model_config=config, **options))
    save_experts(runner.model, experts)
    return figures


if __name__ == "__main__":
    print(json.dumps(load(*sys.argv[1:])))
