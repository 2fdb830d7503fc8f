"""Runs SGLang's engine once. Standard input has a scenario and a line of the output its results, both as JSON:

    {"model": folder, "options": arguments of sglang.Engine, "rounds": [round, ...]}

A round is {"prompts": [tokens, ...], "tokens": how many to generate}, and may have
    "sampling": {...}    more sampling parameters, or a list with those of each prompt
    "logprobs": true     those of the generated tokens are returned
    "stream": true       the answers come in parts
    "abort": [i, ...]    these prompts are aborted after their first part
    "flush": true        the cache of prefixes is emptied before
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    import sglang

    options = {
        "device": "mps",
        "context_length": 1024,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "max_mamba_cache_size": 40,
        "random_seed": 0,
    }
    engine = sglang.Engine(model_path=scenario["model"], **{**options, **scenario["options"]})
    before = probe(engine)
    rounds = [engine.loop.run_until_complete(run_round(engine, each)) for each in scenario["rounds"]]
    engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60))
    after = probe(engine)
    engine.shutdown()
    return {
        "rounds": rounds,
        "compiled late": sorted(set(after["pipelines"]) - set(before["pipelines"])),
        **after,
    }


def probe(engine: Any) -> dict[str, Any]:
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]["probe"]
    return state


async def run_round(engine: Any, each: dict[str, Any]) -> dict[str, Any]:
    if each.get("flush"):
        await engine.tokenizer_manager.flush_cache(timeout_s=60)
    given = each.get("sampling", {})
    answers = await asyncio.gather(
        *(
            ask(engine, each, i, prompt, given[i] if isinstance(given, list) else given)
            for i, prompt in enumerate(each["prompts"])
        )
    )
    return {key: [answer[key] for answer in answers] for key in answers[0]}


async def ask(engine: Any, each: dict[str, Any], i: int, prompt: list[int], given: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": each["tokens"], "ignore_eos": True, **given}
    aborted = i in each.get("abort", [])
    streams = aborted or each.get("stream", False)
    answer = await engine.async_generate(
        input_ids=prompt,
        sampling_params=sampling,
        return_logprob=each.get("logprobs", False),
        stream=streams,
    )
    parts, result = 1, answer
    if streams:
        parts = 0
        async for result in answer:
            parts += 1
            if aborted and parts == 1:
                engine.tokenizer_manager.abort_request(rid=result["meta_info"]["id"])
    meta = result["meta_info"]
    return {
        "tokens": result["output_ids"],
        "cached": meta["cached_tokens"],
        "parts": parts,
        "logprobs": [value for value, *_ in meta.get("output_token_logprobs", [])],
    }


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
