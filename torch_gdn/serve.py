"""Serves a model with an OpenAI-compatible server, on torch_gdn's kernels: `python -m torch_gdn serve`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from torch_gdn import command_line
from torch_gdn._mps import why_no_mps

NAME = f"{command_line.PROGRAM} serve"


def with_vllm(model: str, rest: list[str]) -> None:
    from torch_gdn.integrations.vllm import serve

    sys.argv = [serve.NAME, model, *rest]
    serve.main()


def with_sglang(model: str, rest: list[str]) -> None:
    require("sglang", "SGLang")
    os.environ.setdefault("TORCH_GDN_SGLANG", "mps")
    reason = why_no_mps()
    if reason:
        sys.exit(f"{NAME}: {reason}")
    sys.argv = ["sglang", "--model-path", model, "--device", "mps", *rest]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def with_transformers(model: str, rest: list[str]) -> None:
    require("transformers", "transformers")
    from torch_gdn.integrations.transformers.__main__ import main

    chosen = [] if any(each.startswith("--attn-implementation") for each in rest) else ["--attn-implementation", "sdpa"]
    sys.argv = ["transformers", "serve", model, "--continuous-batching", *chosen, *rest]
    main()


ENGINES: dict[str, Callable[[str, list[str]], None]] = {
    "vllm": with_vllm,
    "sglang": with_sglang,
    "transformers": with_transformers,
}


def require(module: str, name: str) -> None:
    if find_spec(module) is None:
        sys.exit(f"{NAME}: {name} is not installed here; torch_gdn's documentation says how to install it")


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line.serve().parse_args(arguments)
    ENGINES[options.engine](options.model, options.rest)


if __name__ == "__main__":
    main()
