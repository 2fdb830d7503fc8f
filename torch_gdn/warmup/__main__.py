"""Says how to compile kernels before their first use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

EXPLANATION = """\
torch_gdn.warmup is a function, not a command: kernels are compiled for the process that runs them. Call
torch_gdn.warmup(model) in your program, after torch_gdn.enable() and once the model is loaded."""


def main(arguments: Sequence[str] | None = None) -> str:
    """Returns the explanation as the text to exit with."""
    argparse.ArgumentParser(prog="python -m torch_gdn warmup", description=EXPLANATION).parse_known_args(arguments)
    return EXPLANATION


if __name__ == "__main__":
    sys.exit(main())
