"""Tries faults, several at a time, each with a sample of its tests' sweeps first, and keeps the verdicts in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from evidence.proof.checks import Progress
from evidence.proof.mutate.faults import CHECKOUT, Fault
from evidence.proof.mutate.rates import SECONDS
from evidence.proof.mutate.scratch import Scratch
from evidence.proof.mutate.suite import try_together
from evidence.proof.mutate.trial import MISSED, SAMPLED, State, Verdict, line_of, try_fault

FOLDER = CHECKOUT / "build" / "mutate"


def run_all(
    faults: Sequence[Fault],
    progress: Progress,
    *,
    again: bool = False,
    jobs: int = 1,
    folder: Path = FOLDER,
    checkout: Path = CHECKOUT,
) -> dict[str, Verdict]:
    """Returns verdicts of these faults: kept ones, and those of the faults that are tried now."""
    state = State(folder / "state.json", checkout)
    kept = {} if again else {fault.id: result for fault in faults if (result := state.of(fault))}
    return Run(state, folder, checkout, jobs).judge(faults, kept, progress)


def run_drawn(
    faults: Sequence[Fault], seed: str, progress: Progress, jobs: int = 1, *, suite: bool = False
) -> dict[str, Verdict]:
    state = State(FOLDER / "drawn.json", CHECKOUT)
    kept = {fault.id: verdict for fault in faults if (verdict := kept_of_drawn(state, fault))}
    return Run(state, FOLDER, CHECKOUT, jobs, seed, SECONDS, suite).judge(faults, kept, progress)


def kept_of_drawn(state: State, fault: Fault) -> Verdict | None:
    """Newer tests may find a mutant that passed. They change nothing for the others."""
    verdict = state.verdicts.get(fault.id)
    return state.of(fault) if verdict and verdict.word in (MISSED, SAMPLED) else verdict


@dataclass(frozen=True)
class Run:
    state: State
    folder: Path
    checkout: Path
    jobs: int
    seed: str = "0"  # for the sample of the tests' sweeps
    seconds: int = 0  # for one run of the tests; 0 is the usual time
    suite: bool = False  # try what passes with a sample of the whole suite, not with every case of its own tests

    def judge(self, faults: Sequence[Fault], kept: dict[str, Verdict], progress: Progress) -> dict[str, Verdict]:
        result = dict(kept)
        remaining = [fault for fault in faults if fault.id not in result or result[fault.id].word == SAMPLED]
        if not remaining:
            return result
        progress.expect(len(remaining))
        remaining.sort(key=lambda fault: fault.file.startswith("csrc/"))  # csrc/ takes a build
        scratches = self._scratches()
        for sweeps in (self.seed,) if self.suite else (self.seed, "all"):
            for scratch in scratches:
                scratch.sweeps = sweeps
            word = None if sweeps == self.seed else SAMPLED
            group = [fault for fault in remaining if (result[fault.id].word if fault.id in result else None) == word]
            for fault, verdict in try_all(scratches, group):
                result[fault.id] = self.state.verdicts[fault.id] = verdict
                self.state.save()
                if verdict.word != SAMPLED:
                    progress.step(line_of(fault, verdict))
        if self.suite:
            survivors = [fault for fault in remaining if result[fault.id].word == SAMPLED]
            scratches[0].sweeps = self.seed
            for fault, verdict in try_together(scratches[0], survivors):
                result[fault.id] = self.state.verdicts[fault.id] = verdict
                self.state.save()
                progress.step(line_of(fault, verdict))
        return result

    def _scratches(self) -> list[Scratch]:
        names = [f"tree-{job}" if job else "tree" for job in range(self.jobs)]
        scratches = [Scratch(self.folder, self.checkout, name, self.seconds) for name in names]
        for scratch in scratches:
            scratch.refresh()
            scratch.build_clean()
        return scratches


def try_all(scratches: Sequence[Scratch], faults: Sequence[Fault]) -> Iterator[tuple[Fault, Verdict]]:
    """Yields results in the order in which trials end. Each copy tries one at a time."""
    free = SimpleQueue[Scratch]()
    for scratch in scratches:
        free.put(scratch)

    def on_trial(fault: Fault) -> tuple[Fault, Verdict]:
        scratch = free.get()
        try:
            return fault, try_fault(scratch, fault)
        finally:
            free.put(scratch)

    pool = ThreadPoolExecutor(len(scratches))
    try:
        for trial in as_completed([pool.submit(on_trial, fault) for fault in faults]):
            yield trial.result()
    finally:
        pool.shutdown(cancel_futures=True)
