"""Runs vLLM's engine in this process, once for each scenario that standard input lists, one after the other.

A line of the output lists the results. Both are JSON. A scenario is

    {"model": folder, "options": arguments of vllm.LLM, "rounds": [round, ...]}

A round is {"prompts": [tokens, ...], "tokens": how many to generate}, and may have
    "accept": [n, ...]   drafts are made of "continuations", right up to the n-th; of a request the next n each step
    "adapters": [folder or null, ...]   the LoRA adapter of each prompt
    "images": [pixels or null, ...]     of each prompt, which is a text then
    "sleep": true        the engine sleeps and wakes up before
    "abort": [i, ...]    these prompts are aborted after "abort_after" steps of the engine
    "sampling": {...}    arguments of vllm.SamplingParams, over those of greedy sampling; a list has one for each prompt

"launches": true counts what each step launches, by layer and part of the model.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": 1 << 28,
        "seed": 0,
    }
    llm = LLM(model=scenario["model"], **{**options, **scenario["options"]})
    launches = launches_per_step(llm) if scenario.get("launches") else []
    compiled, copies = pipelines(), copies_per_step(llm)
    results = [run_round(llm, each) | {"metrics": metrics(llm)} for each in scenario["rounds"]]
    return {
        "rounds": results,
        "metrics": metrics(llm),
        "pool": pool(llm),
        "compiled late": sorted(pipelines() - compiled),
        "copies per step": copies,
        "launches": launches,
        "version": version(),
    }


def copies_per_step(llm: Any) -> list[int]:
    """Returns a list that gets the number of copies from the host to mps in each of the engine's steps."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result, name = func(*args, **(kwargs or {})), func._schema.name
            if name in ("aten::copy_", "aten::_to_copy"):
                source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], result)
                self.count += (source.device.type, target.device.type) == ("cpu", "mps")
            return result

    counts: list[int] = []
    step = llm.llm_engine.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Copies() as copies:
            result = step(*args, **kwargs)
        counts.append(copies.count)
        return result

    llm.llm_engine.step = counted
    return counts


def launches_per_step(llm: Any) -> list[list[Any]]:
    """Returns a list that gets, for each step, lists of layer, part, launches by name, copies and waits."""
    from bench.launch_counter import counting

    model, step = model_runner(llm).model, llm.llm_engine.step
    steps: list[list[Any]] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counting(model, runs=True) as counter:
            result = step(*args, **kwargs)
        steps.append([[*place, x.launches, x.copies, x.waits] for place, x in counter.counts.items()])
        return result

    llm.llm_engine.step = counted
    return steps


def model_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def run_round(llm: Any, each: dict[str, Any]) -> dict[str, Any]:
    if each.get("sleep"):
        llm.sleep()
        llm.wake_up()
    if "accept" in each:
        force_drafts(llm, each)
    given = each.get("sampling", {})
    sampling: Any = (
        sampling_params(each, given) if isinstance(given, dict) else [sampling_params(each, x) for x in given]
    )
    prompts = with_images(each) if "images" in each else [{"prompt_token_ids": tokens} for tokens in each["prompts"]]
    if "abort" in each:
        return run_with_aborts(llm, each, prompts, sampling)
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters(each))
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens or 0 for output in outputs],
    }


def sampling_params(each: dict[str, Any], given: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    greedy = {"temperature": 0, "max_tokens": each["tokens"], "ignore_eos": True, "detokenize": False}
    if "structured_outputs" in given:
        given = {**given, "structured_outputs": StructuredOutputsParams(**given["structured_outputs"])}
    return SamplingParams(**{**greedy, **given})


def with_images(each: dict[str, Any]) -> list[Any]:
    import numpy as np
    from PIL import Image

    def data(pixels: Any) -> dict[str, Any]:
        return {"multi_modal_data": {"image": Image.fromarray(np.array(pixels, dtype=np.uint8))}} if pixels else {}

    return [{"prompt": text, **data(pixels)} for text, pixels in zip(each["prompts"], each["images"], strict=True)]


def adapters(each: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    folders = each.get("adapters")
    if folders is None:
        return None
    numbers = {folder: number for number, folder in enumerate(dict.fromkeys(folders), 1)}
    return [folder and LoRARequest(folder, numbers[folder], folder) for folder in folders]


def run_with_aborts(llm: Any, each: dict[str, Any], prompts: list[Any], sampling: Any) -> dict[str, Any]:
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, sampling)
    tokens: dict[str, list[int]] = {}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
        step += 1
        if step == each["abort_after"]:
            engine.abort_request([str(i) for i in each["abort"]])
    return {"tokens": [tokens.get(str(i), []) for i in range(len(prompts))], "cached": []}


def force_drafts(llm: Any, each: dict[str, Any]) -> None:
    """vLLM's n-gram proposer gives what was proposed here: the reference's next tokens, wrong from the n-th on."""
    runner = model_runner(llm)
    counts = iter(each["accept"] * 10_000)
    texts = [prompt + tail for prompt, tail in zip(each["prompts"], each["continuations"], strict=True)]

    def propose(
        num_speculative_tokens: int,
        sampled_token_ids: Any,
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        *args: Any,
        **kw: Any,
    ) -> list[list[int]]:
        drafts = []
        for i, sampled in enumerate(sampled_token_ids):
            seen = token_ids_cpu[i, : num_tokens_no_spec[i]].tolist()
            text = next((t for t in texts if t[: len(seen)] == seen and len(t) > len(seen)), None)
            if not len(sampled) or text is None:
                drafts.append([])
                continue
            right = next(counts)
            draft = text[len(seen) : len(seen) + num_speculative_tokens]
            drafts.append([token if at < right else (token + 1) % 200 for at, token in enumerate(draft)])
        return drafts

    runner.drafter.propose = propose


def pipelines() -> set[str]:
    """Returns torch_gdn's compiled pipelines: none on the CPU."""
    import torch

    if not torch.backends.mps.is_available():
        return set()
    from torch_gdn import _C

    return {facts["name"] for facts in _C.pipelines()}


def version() -> str:
    import vllm

    return vllm.__version__


def metrics(llm: Any) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def pool(llm: Any) -> dict[str, int]:
    """Blocks of the pool, and those that no request holds after the last round; {} of an engine in another process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return {}
    blocks = core.scheduler.kv_cache_manager.block_pool
    return {"all": blocks.num_gpu_blocks, "free": blocks.get_num_free_blocks()}


def main() -> None:
    mps_simulator = sys.modules.get("mps_simulator")
    results = []
    for scenario in json.load(sys.stdin):
        if mps_simulator is None:
            results.append(run(scenario))
            continue
        with mps_simulator.profile() as profile:
            result = run(scenario)
        results.append(result | {"kernels": {name: profile.launched(name) for name in sorted(profile.kernels)}})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
