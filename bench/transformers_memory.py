"""Measures the memory that serving inside transformers takes, for docs/transformers-serving.md.

python -m bench.transformers_memory                   draws the memory of 200 requests, served on the CPU
python -m bench.transformers_memory --device-bytes    prints the memory of continuous batching on simulated `mps`,
                                                      for attention to gathered keys and values and to pages
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from torch_gdn.integrations import transformers

REQUESTS, EVERY = 200, 5  # looks only at every fifth, because that reads all Python objects
BUDGET = 4 * 2**20  # bytes for conversations
OPTIONS = {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 256, "max_requests_per_batch": 16}


def small_model(head_size: int = 32) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "head_dim": head_size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    config = Qwen3_5TextConfig(**sizes, **heads, **linear, **layers, eos_token_id=None, bos_token_id=None)
    return Qwen3_5ForCausalLM(config).eval()


def prompt_of(number: int) -> list[int]:
    """Returns a prompt of 20 to 290 tokens. Every other one begins like the previous one."""
    generator = torch.Generator().manual_seed(number // 2)
    shared = torch.randint(1, 64, (20 + 13 * number % 200,), generator=generator)
    own = torch.randint(1, 64, (5 * number % 80,), generator=torch.Generator().manual_seed(number))
    return [*shared.tolist(), *own.tolist()]


def held() -> int:
    """Returns the bytes of all living tensors. torch.compile's fake tensors have none."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = [x.untyped_storage() for x in tensors if not x.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def manager_of(model: Any, new_tokens: int, **options: Any) -> Iterator[Any]:
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    configuration = ContinuousBatchingConfig(**{**OPTIONS, **options})
    with model.continuous_batching_context_manager(generation, continuous_batching_config=configuration) as manager:
        yield manager


def next_result(manager: Any) -> Any:
    while (result := manager.get_result(timeout=1)) is None:
        if not manager.is_running():
            raise RuntimeError("the generation loop ended")
    if result.error is not None:
        raise RuntimeError(result.error)
    return result


def over_requests(requests: int) -> dict[str, list[int]]:
    """Returns the bytes held after every fifth request, by server."""
    from torch_gdn.integrations.transformers.conversation import ConversationCache

    model = small_model()
    result: dict[str, list[int]] = {}
    before = held()
    with manager_of(model, new_tokens=4) as manager:
        taken = result["continuous batching"] = []
        for number in range(requests):
            manager.add_request(prompt_of(number))
            next_result(manager)
            if number % EVERY == EVERY - 1:
                with manager.pause():
                    taken.append(held() - before)
    del manager
    for name, budget in ((f"conversations, {BUDGET // 2**20} MiB", BUDGET), ("conversations, no budget", 2**40)):
        conversations, taken = ConversationCache(model, budget, every=64), result.setdefault(name, [])
        before = held()
        for number in range(requests):
            conversations.generate(torch.tensor([prompt_of(number)]), max_new_tokens=4, do_sample=False, pad_token_id=0)
            if number % EVERY == EVERY - 1:
                taken.append(held() - before)
        del conversations
    return result


def draw(bytes_by_name: dict[str, list[int]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4))
    for name, sizes in bytes_by_name.items():
        axis.plot(range(EVERY, EVERY * len(sizes) + 1, EVERY), [x / 2**20 for x in sizes], label=name)
    axis.set(xlabel="requests", ylabel="MiB of tensors without the model", ylim=0)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def asked_for(to_pages: bool, requests: int, tokens: int) -> dict[str, int]:
    """Returns the device bytes that the manager holds, and those that all steps ask for."""
    import mps_simulator
    from torch_gdn.integrations.transformers import continuous_batching

    ours = continuous_batching.attends_to_pages
    if not to_pages:
        continuous_batching.attends_to_pages = lambda config: False
    blocks = 2 * requests * (tokens // 16 + 1)
    try:
        model = small_model(head_size=64).to("mps")
        with mps_simulator.profile() as start, manager_of(model, 8, num_blocks=blocks) as manager:
            batch = manager.batch_processor  # the first use makes the cache and the inputs
            torch.mps.synchronize()
        del batch
        prompts = [torch.randint(1, 64, (tokens,)).tolist() for _ in range(requests)]
        with manager_of(model, 8, num_blocks=blocks) as manager, mps_simulator.profile() as steps:
            for prompt in prompts:
                manager.add_request(prompt)
            for _ in prompts:
                next_result(manager)
    finally:
        continuous_batching.attends_to_pages = ours
    return {"held": start.allocated_bytes, "asked for": steps.allocated_bytes}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--plot", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument(
        "--device-bytes", action="store_true", help="print only the memory of attention, on simulated mps"
    )
    given = parser.parse_args(arguments)
    os.environ["TORCH_GDN_SELF_TEST"] = "off"  # its copies take memory too
    transformers.enable(continuous_batching=True)
    with torch.no_grad():
        if given.device_bytes:
            import mps_simulator

            mps_simulator.activate(watch=False)
            for requests, tokens in ((1, 256), (8, 256), (32, 256), (8, 1024)):
                for to_pages in (False, True):
                    figures = ", ".join(f"{k} {v:,}" for k, v in asked_for(to_pages, requests, tokens).items())
                    print(f"{requests} x {tokens} tokens, {'pages' if to_pages else 'gathered'}: bytes {figures}")
            return
        result = over_requests(given.requests)
    for name, taken in result.items():
        half = taken[len(taken) // 2 :]
        print(f"{name}: {taken[-1]:,} bytes; over the second half from {min(half):,} to {max(half):,}")
    draw(result, given.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
