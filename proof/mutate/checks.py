"""The check of planted faults, as the table of `python -m proof` shows it."""

from __future__ import annotations

from proof.checks import Finding, Progress, check
from proof.mutate.__main__ import line_of, run_all
from proof.mutate.faults import all_faults, sample
from proof.mutate.trial import CAUGHT

COUNT = 10  # all of them take hours


@check("mutation-sample", "a fault that is planted in shaders, host code, contracts or CPU kernels fails a test")
def mutation_sample_check(progress: Progress) -> Finding:
    faults = sample(all_faults(), COUNT)
    verdicts = run_all(faults, progress)
    problems = [line_of(fault, verdicts[fault.id]) for fault in faults if verdicts[fault.id].word != CAUGHT]
    return Finding(len(faults), problems)
