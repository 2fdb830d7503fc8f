"""Serves a model with an OpenAI-compatible server, on torch_gdn's kernels: `python -m torch_gdn serve`."""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch_gdn import command_line
from torch_gdn._mps import why_no_mps
from torch_gdn.integrations.draining import Drain

NAME = f"{command_line.PROGRAM} serve"


def with_vllm(model: str, rest: list[str], drain: Drain) -> None:
    command_line.require_distribution("torch_gdn_engines", NAME)
    import_module("torch_gdn_engines.vllm.serve").start([model, *rest], drain)


def with_sglang(model: str, rest: list[str], drain: Drain) -> None:
    command_line.require_distribution("torch_gdn_engines", NAME)
    require("SGLang", "sglang")
    os.environ.setdefault("TORCH_GDN_SGLANG", "mps")
    reason = why_no_mps()
    if reason:
        sys.exit(f"{NAME}: {reason}")
    drain.install()
    sys.argv = ["sglang", "--model-path", model, "--device", "mps", *rest]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def with_transformers(model: str, rest: list[str], drain: Drain, drafts: Any = None) -> None:
    """Starts the server. Drafts are for one request at a time, because continuous batching has none."""
    require("Serving with transformers", "transformers")
    from torch_gdn.integrations.transformers.__main__ import main, require_packages

    require_packages()
    chosen = [] if any(each.startswith("--attn-implementation") for each in rest) else ["--attn-implementation", "sdpa"]
    drain.install()
    batching = ["--continuous-batching"] if drafts is None else []
    sys.argv = ["transformers", "serve", model, *batching, *chosen, *rest]
    try:
        main(drafts)
    finally:
        drain.leave()  # transformers leaves its thread of generation running


ENGINES: dict[str, Callable[..., None]] = {
    "vllm": with_vllm,
    "sglang": with_sglang,
    "transformers": with_transformers,
}


def require(page: str, *modules: str) -> None:
    lacking = [module for module in modules if find_spec(module) is None]
    if lacking:
        sys.exit(
            f"{NAME}: expected the package {' and '.join(lacking)}, which is not installed here: torch_gdn's "
            f'documentation, page "{page}", says how to install it'
        )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line.serve().parse_args(arguments)
    if options.drafts is not None and options.engine != "transformers":
        sys.exit(f"{NAME}: --drafts: expected --engine transformers, got {options.engine}, which has its own options")
    timeout, rest = command_line.shutdown_timeout_in(options.rest, options.shutdown_timeout)
    given = [] if options.drafts is None else [options.drafts]
    ENGINES[options.engine](options.model, rest, Drain(NAME, timeout), *given)
