"""`python -m evidence.lab.cuda record FILE` records launches on the simulated device. `run FILE JSON` replays them on a
machine with a GPU, nvcc, compute-sanitizer and this checkout. `page JSON` writes the page of the docs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from evidence.lab.cuda import page, running
from evidence.proof.checks import Silent
from evidence.proof.metal.front_end import CHECKOUT

PAGE = CHECKOUT / "docs" / "lab" / "second-machine.md"
CUBINS = CHECKOUT / "build" / "cuda"


def main() -> int:
    parser = argparse.ArgumentParser("python -m evidence.lab.cuda", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("record", type=Path)
    record.add_argument("--only", default="", help="only cases whose name contains this")
    run = commands.add_parser("run")
    run.add_argument("record", type=Path)
    run.add_argument("json", type=Path)
    run.add_argument("--parts", nargs="+", choices=running.PARTS, default=list(running.PARTS))
    run.add_argument("--cubins", type=Path, default=CUBINS)
    written = commands.add_parser("page")
    written.add_argument("json", type=Path)
    options = parser.parse_args()

    if options.command == "record":
        from evidence.lab.cuda.recording import record_all  # needs torch

        print(f"{record_all(options.record, Silent(), options.only)} cases")
        return 0
    if options.command == "page":
        PAGE.write_text(page.text(json.loads(options.json.read_text())))
        return 0

    def keep(found: dict[str, Any]) -> None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")

    found = running.run(options.record, options.cubins, options.parts, Silent(), keep)
    print("\n".join(found["problems"]) or "nothing wrong")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
