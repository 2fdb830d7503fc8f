"""Runs `python -m torch_gdn COMMAND`. `torch_gdn.command_line` has the commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from torch_gdn import command_line


def main(arguments: Sequence[str] | None = None) -> int | str | None:
    command, rest = command_line.split(sys.argv[1:] if arguments is None else arguments)
    command_line.require_distribution(command.module.partition(".")[0], command_line.PROGRAM)
    status: int | str | None = importlib.import_module(command.module).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
