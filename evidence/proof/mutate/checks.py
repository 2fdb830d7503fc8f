"""The check of planted faults and of drawn mutants, as the table of `python -m evidence.proof` shows it."""

from __future__ import annotations

from evidence.proof.checks import Finding, Progress, check
from evidence.proof.mutate.drawn import new_seed
from evidence.proof.mutate.faults import all_faults, sample
from evidence.proof.mutate.mutants import draw
from evidence.proof.mutate.rates import COUNT as DRAWN
from evidence.proof.mutate.runs import run_all, run_drawn
from evidence.proof.mutate.trial import CAUGHT, MISSED, line_of

COUNT = 10  # planted faults; all of them take hours
ALLOWED = 5  # drawn mutants that pass, of which no program can see some


@check("mutation-sample", "a fault planted in shaders, host code, contracts or CPU kernels makes a test fail")
def mutation_sample_check(progress: Progress) -> Finding:
    faults = sample(all_faults(), COUNT)
    verdicts = run_all(faults, progress)
    problems = [line_of(fault, verdicts[fault.id]) for fault in faults if verdicts[fault.id].word != CAUGHT]
    seed = new_seed()
    drawn = draw(DRAWN, seed)
    verdicts = run_drawn(drawn, seed, progress)
    passed = [line_of(fault, verdicts[fault.id]) for fault in drawn if verdicts[fault.id].word == MISSED]
    notes = [
        f"mutants of seed {seed}: python -m evidence.proof.mutate.drawn {DRAWN} --seed {seed} repeats them",
        *passed,
    ]
    problems += passed if len(passed) > ALLOWED else []
    kinds = {"planted": len(faults), "drawn": len(drawn)}
    return Finding(len(faults) + len(drawn), problems, notes, kinds=kinds)
