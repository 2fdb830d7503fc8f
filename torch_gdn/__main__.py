"""The commands of torch_gdn.

    python -m torch_gdn info                     versions, the machine, the ops and the kernels: for a bug report
    python -m torch_gdn check --quick            tests every kernel on the mps device and writes a report
    python -m torch_gdn tune                     finds and stores the fastest prefill algorithm on this machine
    python -m torch_gdn fits MODEL               prints how much memory a model needs, and the Mac that it fits on
    python -m torch_gdn serve MODEL              serves a model with vLLM, SGLang or transformers
    python -m torch_gdn warmup                   prints how to compile kernels before their first use

Each command takes --help. You can also run each one as a module: `python -m torch_gdn.info` and so on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {  # and the module whose `main` takes the arguments after the command
    "info": "torch_gdn.info",
    "check": "torch_gdn.check.__main__",
    "tune": "torch_gdn.tune",
    "fits": "torch_gdn.fits",
    "serve": "torch_gdn.serve",
    "warmup": "torch_gdn.warmup.__main__",
}


def main(arguments: Sequence[str] | None = None) -> int | str | None:
    parser = argparse.ArgumentParser(
        prog="python -m torch_gdn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, help="what to do")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given[:1])
    if options.command is None:
        parser.print_help()
        return None
    status: int | str | None = importlib.import_module(COMMANDS[options.command]).main(given[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
