"""Runs `python -m torch_gdn COMMAND`. `torch_gdn.command_line` has the commands."""

import importlib
import os
import sys
from collections.abc import Sequence

from torch_gdn import command_line


def main(arguments: Sequence[str] | None = None) -> int | str | None:
    command, rest = command_line.split(sys.argv[1:] if arguments is None else arguments)
    command_line.require_distribution(command.module.partition(".")[0], command_line.PROGRAM)
    status: int | str | None = importlib.import_module(command.module).main(rest)
    return status


def run() -> int | str | None:
    """Runs the command. If the reader of its output ends first, as `head` does, that is no error of ours."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
