"""python -m mps_simulator SCRIPT ARGS | -m MODULE ARGS | -c CODE: runs a program with device "mps" simulated."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import mps_simulator

USAGE = "usage: python -m mps_simulator [--no-watch] [--perturb] [--seed N] (SCRIPT | -m MODULE | -c CODE) ARGS..."


def main() -> None:
    arguments = sys.argv[1:]
    watch, perturb, seed = True, False, 0
    while arguments and arguments[0] in ("--no-watch", "--perturb", "--seed"):
        option = arguments.pop(0)
        if option == "--no-watch":
            watch = False
        elif option == "--perturb":
            perturb = True
        elif not arguments or not arguments[0].isdigit():
            sys.exit(f"--seed: expected a number\n{USAGE}")
        else:
            seed = int(arguments.pop(0))
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{__doc__}\n{USAGE}")
        sys.exit(0 if arguments else 2)
    if arguments[0] in ("-m", "-c") and len(arguments) < 2:
        sys.exit(f"{arguments[0]}: expected {'a module' if arguments[0] == '-m' else 'code'}\n{USAGE}")
    if arguments[0] not in ("-m", "-c") and not Path(arguments[0]).is_file():
        sys.exit(f"no script {arguments[0]!r}\n{USAGE}")
    mps_simulator.activate(watch=watch, perturb=perturb, seed=seed)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
