"""Stores what the self-test found, in one file per device, macOS build, torch and torch_gdn."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torch_gdn import _C, _files
from torch_gdn._mps import command_output
from torch_gdn._version import __version__

FORMAT = 3


@dataclass(frozen=True)
class Verdict:
    """The test's result for an op, or for one algorithm of an op, and one kernel variant."""

    op: str
    algorithm: str | None  # a prefill's, or that of an op which decodes
    problem: str = ""  # empty if passed
    running: int = 0  # the process that is testing it


Verdicts = dict[str, Verdict]  # by the op and the kernel variant, with a space between


def machine() -> str:
    """Names the machine and software that verdicts apply to. A checkout's shaders change without a new version."""
    system = platform.platform()
    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]} ({command_output('sw_vers', '-buildVersion')})"
    root, shaders = Path(_C.shader_directory()), hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.suffix in (".metal", ".h")):
        shaders.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    software = f"torch {torch.__version__}, torch_gdn {__version__}, shaders {shaders.hexdigest()[:12]}"
    return f"{_files.key()}, {system}, {software}"


def path(key: str) -> Path:
    table = _files.tuning_file()
    folder = table.parent if table else _files.folder()
    return folder / f"self_test_{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read(key: str) -> Verdicts:
    """Returns nothing for a file that cannot be read or that another version wrote."""
    try:
        content = json.loads(path(key).read_text(encoding="utf-8"))
        if (content["format"], content["machine"]) != (FORMAT, key):
            return {}
        return {name: Verdict(**row) for name, row in content["verdicts"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return {}


def change(key: str, news: Mapping[str, Verdict | None]) -> None:
    """Writes these verdicts, and deletes those that are None. Other processes' stay as they are.

    If there is no folder or it cannot be written, the next process tests again.
    """
    with suppress(OSError, ValueError, RuntimeError), _files.locked(path(key)):
        rows = {name: asdict(x) for name, x in {**read(key), **news}.items() if x is not None}
        _files.write_whole(path(key), json.dumps({"format": FORMAT, "machine": key, "verdicts": rows}, indent=1) + "\n")


def settled(key: str) -> Verdicts:
    """Returns the verdicts in the machine's file, without those that another process is testing now."""
    known = read(key)
    for name, each in list(known.items()):
        if each.running and each.running != os.getpid() and is_alive(each.running):
            del known[name]
        elif each.running:
            known[name] = Verdict(each.op, each.algorithm, "the process ended while the test ran")
    return known


def is_alive(process: int) -> bool:
    with suppress(PermissionError):  # another user's process
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True
