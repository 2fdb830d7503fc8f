"""`python -m evidence.proof.mutate.drawn 20 --seed 7`: draws mutants, plants them one at a time, and prints what caught
each.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence

from evidence.proof.mutate.faults import CHECKOUT
from evidence.proof.mutate.mutants import FEATURES, SOURCES, draw
from evidence.proof.mutate.rates import RECORD, read_record, record_text, with_verdicts
from evidence.proof.mutate.runs import FOLDER, run_drawn
from evidence.proof.mutate.trial import MISSED, State


def new_seed() -> str:
    return str(random.SystemRandom().randrange(10**6))


def main(arguments: Sequence[str] | None = None) -> int:
    from evidence.proof.mutate.__main__ import FaultBar, write_page

    parser = argparse.ArgumentParser(prog="python -m evidence.proof.mutate.drawn", description=__doc__)
    parser.add_argument("count", type=int, help="so many mutants")
    parser.add_argument("--seed", default=new_seed(), help="of the draw; it is printed")
    parser.add_argument(
        "--in", dest="folder", choices=[source.folder for source in SOURCES], help="in this folder alone"
    )
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=[], help="from the files of these alone")
    parser.add_argument(
        "--suite", action="store_true", help="try what passes with the whole suite, as `make test` runs it"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="try N at a time, each in its own copy")
    parser.add_argument("--list", action="store_true", help="list the mutants and their tests, and plant none")
    parser.add_argument("--write", action="store_true", help="record the verdicts, without rows whose line is gone")
    options = parser.parse_args(arguments)

    print(f"seed {options.seed}", flush=True)
    sources = [source for source in SOURCES if options.folder in (None, source.folder)]
    faults = draw(options.count, options.seed, sources, options.features)
    if options.list:
        for fault in faults:
            print(f"{fault.id}\n    {' '.join(fault.tests)}")
        return 0
    if options.write:
        state = State(FOLDER / "drawn.json", CHECKOUT)
        rows = [row for old in read_record(RECORD.read_text()) if (row := old.refit(CHECKOUT))]
        rows = with_verdicts(rows, options.seed, faults, state.verdicts)
        RECORD.write_text(record_text(rows))
        write_page()
        return 0
    bar = FaultBar()
    verdicts = run_drawn(faults, options.seed, bar, options.jobs, suite=options.suite)
    bar.close()
    print("\n".join(f"{count} {word}" for word, count in Counter(each.word for each in verdicts.values()).items()))
    return 1 if any(verdict.word == MISSED for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
