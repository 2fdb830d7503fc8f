"""The versions of transformers that the integration is tested with, each in a folder and a process of its own.

    python -m tests.integrations.versions                 the tests, with each version in turn
    python -m tests.integrations.versions 5.12.0          with one
    python -m tests.integrations.versions --table         the table in docs/accuracy.md: measured distances

A version is downloaded once, with what it needs and this environment has another version of, into $TORCH_GDN_CACHE,
else ~/.cache/torch_gdn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evidence.proof.mac.wheels import cache_directory

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALLED = "5.24.0"
PREVIOUS = "5.23.0"  # all that INSTALLED has is tested with it too, but for launches and compiled graphs
WITH_KERNELS = "5.22.0"  # installed with kernels; the last one whose version of it we could download
HTTPX = ("httpx<1", "httpcore<2", "h11<1", "anyio<5", "sniffio<2")  # huggingface_hub needs them before version 2
# These are the packages that each version was released with. The other packages are this environment's.
PACKAGES: dict[str, tuple[str, ...]] = {
    "4.57.6": ("huggingface_hub<1", "tokenizers<0.23"),
    "5.12.0": ("huggingface_hub<2", "tokenizers<0.23", *HTTPX),
    "5.16.0": ("huggingface_hub<2", "tokenizers<0.24", *HTTPX),
    WITH_KERNELS: ("kernels<0.18", "kernels-data<0.18", "tomlkit<1"),
    PREVIOUS: (),
}
SUBJECTS = {  # of the tests, by version
    PREVIOUS: (
        *("", "_switch", "_norms", "_forms", "_planted", "_layers", "_in_place", "_decoding", "_convolutions", "_kda"),
        *("_checkpointing", "_experts", "_batching", "_prefixes", "_rollback", "_conversation", "_quantized", "_serve"),
        *("_gguf", "_gradients"),
    ),
}
CACHES_OF_LAYERS = ("5.12.0", "5.16.0")  # which run the tests of AuraCache too
IN_THE_TABLE = ("4.57.6", "5.12.0", "5.16.0", PREVIOUS)


class Unavailable(Exception):
    """Raised if the wheels cannot be downloaded."""


def folder(version: str) -> Path:
    """Returns the folder of the version and its packages, which are downloaded the first time."""
    packages = (f"transformers=={version}", *PACKAGES[version])
    place = cache_directory() / "transformers" / version
    if (place / "complete").exists() and (place / "complete").read_text().split() == list(packages):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        options = ("--quiet", "--retries", "1", "--no-deps", "--only-binary", ":all:", "--target", str(unfinished))
        command = [sys.executable, "-m", "pip", "install", *options, *packages]
        finished = subprocess.run(command, text=True, capture_output=True, check=False, timeout=300)
        if finished.returncode:
            raise Unavailable(f"pip finds no {' '.join(packages)}: {finished.stderr.strip().splitlines()[-1]}")
        (unfinished / "complete").write_text("\n".join(packages))
        shutil.rmtree(place, ignore_errors=True)
        unfinished.rename(place)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip gives no {' '.join(packages)} within 300 s") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return place


def run(version: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs python with this version of transformers before the installed one."""
    paths = [str(ROOT)] if version == INSTALLED else [str(folder(version)), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, text=True, check=False, **options)


def tests_with(version: str) -> tuple[str, ...]:
    subjects = SUBJECTS.get(version, ("", "_switch", "_norms", "_forms"))
    files = [f"tests/integrations/test_transformers{subject}.py" for subject in subjects]
    of_aura = ("", "_windows", "_file") if version in CACHES_OF_LAYERS else ()
    return (*files, *(f"tests/aura/test_aura_cache{subject}.py" for subject in of_aura))


def run_tests(version: str, *tests: str, **options: Any) -> subprocess.CompletedProcess[str]:
    plain = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not (test_aura_cache and mps)")
    return run(version, "-m", "pytest", *plain, *tests, **options)


def table() -> str:
    lines = [
        "| model | transformers | cpu, f32 | cpu, bf16 | Metal, f32 | Metal, bf16 |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[str, list[str]] = {}
    for version in IN_THE_TABLE:
        finished = run(version, "-m", "tests.integrations.measure", stdout=subprocess.PIPE)
        finished.check_returncode()
        result = json.loads(finished.stdout.splitlines()[-1])
        assert result["transformers"] == version, result
        for kind, measured in result["measured"].items():
            figures = " | ".join(f"{x['f32']:.1e} | {x['bf16']:.2f}" for x in measured.values())
            rows.setdefault(kind, []).append(f"| {kind} | {version} | {figures} |")
    return "\n".join(lines + [row for measured in rows.values() for row in measured])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"{', '.join(PACKAGES)} or {INSTALLED}")
    parser.add_argument("--table", action="store_true", help="measure, and print the table of docs/accuracy.md")
    options = parser.parse_args()
    if unknown := set(options.versions) - {*PACKAGES, INSTALLED}:
        parser.error(f"VERSION: expected {', '.join(PACKAGES)} or {INSTALLED}, got {', '.join(sorted(unknown))}")
    if options.table:
        print(table())
        return 0
    return max(
        run_tests(version, *tests_with(version)).returncode for version in options.versions or (*PACKAGES, INSTALLED)
    )


if __name__ == "__main__":
    sys.exit(main())
