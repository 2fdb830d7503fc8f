"""Runs one server of the serving section in a separate process: it serves requests and notes when each token came.

    python -m bench.server make FOLDER            makes a model with random weights
    python -m bench.server vllm FOLDER            runs vLLM's engine; TORCH_GDN_VLLM says whether with torch_gdn
    python -m bench.server transformers FOLDER    runs generate(), one request after another
    python -m bench.server transformers FOLDER enable    does the same with torch_gdn's kernels

A line of standard input is a job, {"prompts": [tokens, ...], "clients": n, "tokens": how many to generate}. Each client
has one request in flight and sends its next when that is finished. The answer is a line {"submitted": [seconds, ...],
"arrived": [[seconds of each token, ...], ...], "seconds": of all}. End of input ends the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

CONFIG = {  # Qwen3.5-0.8B's layers, but only four of them, and fewer tokens in the vocabulary
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
ANSWER = '{"submitted"'  # begins an answer, because vLLM logs to standard output too
Job = dict[str, Any]
Serve = Callable[[Job], dict[str, Any]]


class Clock:
    """When requests were submitted and their tokens arrived, in seconds since the job began."""

    def __init__(self, job: Job) -> None:
        self.waiting = deque(range(len(job["prompts"])))
        self.submitted = [0.0] * len(job["prompts"])
        self.arrived: list[list[float]] = [[] for _ in job["prompts"]]
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def next_request(self) -> int | None:
        """Returns the request that a client submits now, or None if all are submitted."""
        if not self.waiting:
            return None
        request = self.waiting.popleft()
        self.submitted[request] = self.now()
        return request

    def answer(self) -> dict[str, Any]:
        return {"submitted": self.submitted, "arrived": self.arrived, "seconds": self.now()}


def serve_sequentially(job: Job, generate: Callable[[list[int], int, Callable[[], None]], None]) -> dict[str, Any]:
    """Serves requests in the order of submission. `generate` calls its last argument at each token."""
    clock = Clock(job)
    queue = deque(clock.next_request() for _ in range(min(job["clients"], len(job["prompts"]))))
    while queue:
        request = queue.popleft()
        if request is not None:
            generate(job["prompts"][request], job["tokens"], lambda at=request: clock.arrived[at].append(clock.now()))  # type: ignore[misc]
            queue.append(clock.next_request())
    return clock.answer()


def serve_batched(job: Job, engine: Any, params: Any, name: str) -> dict[str, Any]:
    """Serves with an engine that batches, with vLLM's add_request, step and has_unfinished_requests."""
    clock = Clock(job)

    def submit() -> None:
        request = clock.next_request()
        if request is not None:
            engine.add_request(f"{name}.{request}", {"prompt_token_ids": job["prompts"][request]}, params)

    for _ in range(job["clients"]):
        submit()
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), clock.now()
        for output in outputs:
            request = int(output.request_id.split("-")[0].split(".")[1])  # vLLM appends to the name
            new = len(output.outputs[0].token_ids) - len(clock.arrived[request])
            clock.arrived[request] += [now] * new
            if output.finished:
                submit()
    return clock.answer()


def serve_vllm(folder: str) -> Serve:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 29,
        seed=0,
    )
    jobs = iter(range(1 << 30))

    def serve(job: Job) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
        return serve_batched(job, llm.llm_engine, params, f"job{next(jobs)}")

    return serve


def serve_transformers(folder: str, enable: bool) -> Serve:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Arrivals(BaseStreamer):
        """Receives the prompt, then each token."""

        def __init__(self, arrive: Callable[[], None]) -> None:
            self.arrive, self.has_prompt = arrive, False

        def put(self, value: Any) -> None:
            if self.has_prompt:
                self.arrive()
            self.has_prompt = True

        def end(self) -> None:
            pass

    if enable:
        from torch_gdn.integrations import transformers as integration

        integration.enable()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(prompt: list[int], tokens: int, arrive: Callable[[], None]) -> None:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "streamer": Arrivals(arrive)}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)

    return lambda job: serve_sequentially(job, generate)


def make(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG), dtype=torch.bfloat16).save_pretrained(folder)


def main() -> None:
    what, folder, *rest = sys.argv[1:]
    if what == "make":
        return make(folder)
    serve = serve_vllm(folder) if what == "vllm" else serve_transformers(folder, rest == ["enable"])
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
    return None


if __name__ == "__main__":
    main()
