"""Compiles many kernel variants. Variants of one file share a source; several sources compile at a time."""

import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from torch_gdn import _C
from torch_gdn._recorder import KernelVariant

# A source's variants share the work of reading it. More of them would leave cores idle while the last file is compiled.
MOST_OF_SOURCE = 8
Variants = list[KernelVariant]


def by_source(variants: Iterable[KernelVariant]) -> list[Variants]:
    """Groups the variants by file, with at most MOST_OF_SOURCE in a group."""
    groups: list[Variants] = []
    for _, in_file in itertools.groupby(sorted(variants, key=lambda each: each.file), key=lambda each: each.file):
        rest = list(in_file)
        groups += [rest[i : i + MOST_OF_SOURCE] for i in range(0, len(rest), MOST_OF_SOURCE)]
    return groups


def compile_source(variants: Variants) -> int:
    """Compiles variants of one file. If one fails, the others are still compiled."""
    _C.compile_file(variants[0].file, [(each.kernel, list(each.arguments)) for each in variants])
    return len(variants)


def compile_variants(variants: Iterable[KernelVariant], done: Callable[[int], object]) -> None:
    """Compiles all that can be compiled, then raises the first error. Calls done() with each newly compiled number."""
    threads = ThreadPoolExecutor(os.cpu_count())
    calls = [threads.submit(compile_source, group) for group in by_source(variants)]
    try:
        for call in as_completed(calls):
            if call.exception() is None:
                done(call.result())
        for call in calls:
            call.result()
    finally:
        threads.shutdown(cancel_futures=True)  # waits for those already started: Metal cannot stop compiling
