"""Stores what the self-test found, in one file per device, macOS build, torch and torch_gdn."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torch_gdn import _C
from torch_gdn._files import folder, locked, tuning_file, write_whole
from torch_gdn._mps import command_output
from torch_gdn._version import __version__

FORMAT = 2
ENDED = "the process ended while the test ran"


@dataclass(frozen=True)
class Verdict:
    """The test's result for an op, or for one algorithm of an op, and one kernel variant."""

    op: str
    algorithm: str | None  # a prefill's algorithm
    problem: str = ""  # empty if passed
    running: int = 0  # the process that is testing it


Verdicts = dict[str, Verdict]  # by the op and the kernel variant, with a space between


def algorithm_of(op: str, variants: list[str]) -> str | None:
    """Returns the prefill algorithm that has these kernels, for an op that has several."""
    if op.removesuffix("_") not in ("chunk_gated_delta_rule", "chunk_kda"):
        return None
    kernels = " ".join(variants)
    return "fused_chunk" if "fused_chunk" in kernels else "recurrent" if "fused_recurrent" in kernels else "chunked"


def machine() -> str:
    """Names the machine and software that verdicts apply to. A checkout's shaders change without a new version."""
    facts = _C.device_facts()
    device = _C.tuning_key(facts["name"], facts["core_count"])
    return f"{device}, {system()}, torch {torch.__version__}, torch_gdn {__version__}, shaders {shaders()}"


def system() -> str:
    if sys.platform != "darwin":
        return platform.platform()
    return f"macOS {platform.mac_ver()[0]} ({command_output('sw_vers', '-buildVersion')})"


def shaders() -> str:
    root = Path(_C.shader_directory())
    digest = hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.suffix in (".metal", ".h")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def path(key: str) -> Path:
    table = tuning_file()
    place = folder() if table is None else table.parent
    return place / f"self_test_{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read(key: str) -> Verdicts:
    """Returns nothing for a file that cannot be read or that another version wrote."""
    try:
        content = json.loads(path(key).read_text(encoding="utf-8"))
        if (content["format"], content["machine"]) != (FORMAT, key):
            return {}
        return {name: Verdict(**row) for name, row in content["verdicts"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return {}


def write(key: str, verdicts: Verdicts) -> None:
    """Writes the file. If there is no folder or it cannot be written, the next process tests again."""
    content = {"format": FORMAT, "machine": key, "verdicts": {name: asdict(x) for name, x in verdicts.items()}}
    try:
        write_whole(path(key), json.dumps(content, indent=1) + "\n")
    except (OSError, ValueError, RuntimeError):
        return


def change(key: str, news: dict[str, Verdict | None]) -> None:
    """Writes these verdicts, and deletes those that are None. Other processes' stay as they are."""
    with suppress(RuntimeError, ValueError), locked(path(key)):  # a user without a home has no file
        write(key, {name: x for name, x in (read(key) | news).items() if x is not None})


def is_left_behind(verdict: Verdict) -> bool:
    """Returns whether the testing process is gone: the test then crashed it."""
    if verdict.running in (0, os.getpid()):
        return verdict.running != 0
    try:
        os.kill(verdict.running, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        return False
    return False


def settled(key: str) -> Verdicts:
    """Returns the verdicts in the machine's file, without those that another process is testing now."""
    known = read(key)
    ended = {name: Verdict(x.op, x.algorithm, ENDED) for name, x in known.items() if is_left_behind(x)}
    return {name: x for name, x in known.items() if not x.running} | ended
