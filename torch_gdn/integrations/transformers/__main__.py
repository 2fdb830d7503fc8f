"""Runs python -m torch_gdn.integrations.transformers serve MODEL --continuous-batching: transformers' own command line
with models on torch_gdn, in continuous batching too.
"""

from __future__ import annotations

import sys

from torch_gdn.integrations.transformers.switch import enable


def main() -> None:
    enable(continuous_batching=True)
    from transformers.cli.transformers import main as command

    sys.argv[0] = "transformers"
    command()


if __name__ == "__main__":
    main()
