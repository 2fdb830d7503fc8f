"""Plants faults in a copy of the checkout, one at a time, and prints which test caught each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tqdm import tqdm

from evidence.proof.checks import Bar
from evidence.proof.mutate.faults import CHECKOUT, Fault, all_faults, sample
from evidence.proof.mutate.page import PAGE, RECORD, page_text, record_text, recorded
from evidence.proof.mutate.rates import RECORD as DRAWN
from evidence.proof.mutate.rates import read_record
from evidence.proof.mutate.runs import FOLDER, run_all
from evidence.proof.mutate.trial import CAUGHT, State, line_of


class FaultBar(Bar):
    """Prints each fault's verdict above the bar."""

    def __init__(self) -> None:
        super().__init__("fault")

    def step(self, what: str) -> None:
        super().step("")
        tqdm.write(what)


def write_record(faults: Sequence[Fault]) -> None:
    """Records the verdicts in `build/mutate`. A fault without one keeps what was recorded."""
    state = State(FOLDER / "state.json", CHECKOUT)
    new = {fault.id: verdict for fault in faults if (verdict := state.of(fault))}
    RECORD.write_text(record_text(faults, recorded(RECORD.read_text()) | new))
    write_page()


def write_page() -> None:
    PAGE.write_text(page_text(all_faults(), recorded(RECORD.read_text()), read_record(DRAWN.read_text())))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.proof.mutate", description=__doc__)
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only faults with this in their name, kind or file",
    )
    parser.add_argument("--sample", metavar="N", type=int, help="only N faults, from every kind and part in turn")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="try N faults at a time, each in its own copy")
    parser.add_argument("--list", action="store_true", help="list the faults and their tests, and plant none")
    parser.add_argument("--again", action="store_true", help="try faults again that have a verdict")
    parser.add_argument("--write", action="store_true", help="record the verdicts, and plant none")
    options = parser.parse_args(arguments)

    known = all_faults()
    if options.write:
        write_record(known)
        return 0
    wanted = sample(known, options.sample) if options.sample else known
    for pattern in options.only:
        wanted = [fault for fault in wanted if pattern in f"{fault.id}\n{fault.kind}\n{fault.file}"]
    if options.list:
        for fault in wanted:
            print(f"{fault.kind:9} {fault.file}: {fault.id}\n{'':10}{' '.join(fault.tests)}")
        return 0
    bar = FaultBar()
    verdicts = run_all(wanted, bar, again=options.again, jobs=options.jobs)
    bar.close()
    not_caught = [fault for fault in wanted if verdicts[fault.id].word != CAUGHT]
    for fault in not_caught:
        print(line_of(fault, verdicts[fault.id]))
    print(f"{len(wanted)} faults, {len(wanted) - len(not_caught)} caught")
    return 1 if not_caught else 0


if __name__ == "__main__":
    sys.exit(main())
