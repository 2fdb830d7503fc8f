"""Stores the prefill algorithms measured on this machine. `torch_gdn tune` writes the file, the import reads it.

The file is $TORCH_GDN_TUNING_CACHE, else ~/.config/torch_gdn/tuning_cache.json. If the variable is empty, no file is
read. If the file cannot be used, a warning says so and the heuristic decides.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_gdn import _C, _files
from torch_gdn._files import write_whole

VARIABLE, path = _files.TUNING_VARIABLE, _files.tuning_file
VERSION = 4  # the file's version
WITHOUT_RULES = 3  # an older version, whose rows have no rule: only the delta rule was measured
DELTA_RULE, KDA = "delta_rule", "kda"
RULES = (DELTA_RULE, KDA)
FUSED_CHUNK_SIZES = (8, 16, 32)


@dataclass(frozen=True)
class Row:
    """One measured shape and its fastest algorithm."""

    tokens: int  # per sequence
    threadgroups: int  # value heads of all sequences, times tiles of 32 columns of V
    K: int
    algorithm: str
    chunk_size: int = 0  # for fused_chunk: 8, 16 or 32
    rule: str = DELTA_RULE  # one of RULES, the one that was measured; the row decides for no other
    seconds: dict[str, float] = field(default_factory=dict)  # by algorithm; nothing reads it


Table = dict[str, list[Row]]  # by device and number of cores


def key() -> str:
    """Returns the name of this machine's rows."""
    facts = _C.device_facts()
    return _C.tuning_key(facts["name"], facts["core_count"])


def read(file: Path) -> Table:
    """Reads a file that `write` wrote.

    Raises:
        ValueError: If `write` did not write it. The text has the file's name and what is wrong.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: expected a table of prefill algorithms: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version not in (WITHOUT_RULES, VERSION):
        raise ValueError(
            f"{file}: version: expected {VERSION}, got {version!r}; python -m torch_gdn tune writes a new one"
        )
    devices = content.get("devices")
    if not isinstance(devices, dict):
        raise ValueError(f"{file}: devices: expected an object of device names, got {devices!r}")
    return {device: rows_of(file, device, rows) for device, rows in devices.items()}


def rows_of(file: Path, device: str, rows: Any) -> list[Row]:
    if not isinstance(rows, list):
        raise ValueError(f"{file}: {device}: expected a list of rows, got {rows!r}")
    return [row_of(f"{file}: {device}: row {number}", row) for number, row in enumerate(rows)]


def row_of(label: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{label}: expected an object, got {row!r}")
    for name in ("tokens", "threadgroups", "K"):
        if type(row.get(name)) is not int or row[name] < 1:
            raise ValueError(f"{label}: {name}: expected a positive integer, got {row.get(name)!r}")
    if row.get("algorithm") not in _C.prefill_algorithms():
        known = ", ".join(map(repr, _C.prefill_algorithms()))
        raise ValueError(f"{label}: algorithm: expected one of {known}, got {row.get('algorithm')!r}")
    chunk_size = row.get("chunk_size", 0)
    allowed = (0, *FUSED_CHUNK_SIZES) if row["algorithm"] == "fused_chunk" else (0,)
    if type(chunk_size) is not int or chunk_size not in allowed:
        raise ValueError(f"{label}: chunk_size: expected one of {allowed}, got {chunk_size!r}")
    rule = row.get("rule", DELTA_RULE)
    if rule not in RULES:
        raise ValueError(f"{label}: rule: expected one of {', '.join(map(repr, RULES))}, got {rule!r}")
    seconds = row.get("seconds", {})
    if not isinstance(seconds, dict):
        raise ValueError(f"{label}: seconds: expected an object, got {seconds!r}")
    return Row(row["tokens"], row["threadgroups"], row["K"], row["algorithm"], chunk_size, rule, seconds)


def write(file: Path, table: Table) -> None:
    content = {"version": VERSION, "devices": {device: [asdict(row) for row in rows] for device, rows in table.items()}}
    write_whole(file, json.dumps(content, indent=1) + "\n")


def install(table: Table) -> None:
    """Makes later prefills on `mps` use these rows, each device its own."""
    _C.set_tuning_cache(
        {
            device: [
                (row.tokens, row.threadgroups, row.K, row.rule == KDA, row.algorithm, row.chunk_size) for row in rows
            ]
            for device, rows in table.items()
        }
    )


def install_file() -> None:
    """Installs the rows of this machine's file. Importing torch_gdn calls it."""
    try:
        file = path()
        if file is not None and file.exists():
            install(read(file))
    except (ValueError, OSError) as error:
        warnings.warn(f"torch_gdn: the heuristic picks prefill algorithms: {error}", stacklevel=2)
