"""Stores the prefill algorithms measured on this machine. `torch_gdn tune` writes the file, the import reads it.

`torch_gdn._files` says which file. If it cannot be used, a warning says so and the heuristic decides.
"""

import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch_gdn import _C
from torch_gdn._files import TUNING_VARIABLE as VARIABLE
from torch_gdn._files import key, read_parts, write_parts
from torch_gdn._files import tuning_file as path

__all__ = ["VARIABLE", "key", "path"]
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


def read(file: Path) -> Table:
    """Reads a file that `write` wrote.

    Raises:
        ValueError: If `write` did not write it. The text has the file's name and what is wrong.
    """
    devices = read_parts(file).get("devices")
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
    row = {"chunk_size": 0, "rule": DELTA_RULE, "seconds": {}} | row

    def expect(name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{label}: {name}: expected {expected}, got {row.get(name)!r}")

    for name in ("tokens", "threadgroups", "K"):
        expect(name, type(row.get(name)) is int and row[name] >= 1, "a positive integer")
    algorithms = _C.prefill_algorithms()
    expect("algorithm", row.get("algorithm") in algorithms, f"one of {', '.join(map(repr, algorithms))}")
    sizes = (0, *FUSED_CHUNK_SIZES) if row["algorithm"] == "fused_chunk" else (0,)
    expect("chunk_size", type(row["chunk_size"]) is int and row["chunk_size"] in sizes, f"one of {sizes}")
    expect("rule", row["rule"] in RULES, f"one of {', '.join(map(repr, RULES))}")
    expect("seconds", isinstance(row["seconds"], dict), "an object")
    return Row(**{each.name: row[each.name] for each in fields(Row)})


def write(file: Path, table: Table) -> None:
    write_parts(file, {"devices": {device: [asdict(row) for row in rows] for device, rows in table.items()}})


def install(table: Table) -> None:
    """Makes later prefills on `mps` use these rows, each device its own."""

    def entry(row: Row) -> tuple[int, int, int, bool, str, int]:
        return row.tokens, row.threadgroups, row.K, row.rule == KDA, row.algorithm, row.chunk_size

    _C.set_tuning_cache({device: list(map(entry, rows)) for device, rows in table.items()})


def install_file() -> None:
    """Installs the rows of this machine's file. Importing torch_gdn calls it."""
    try:
        file = path()
        if file is not None and file.exists():
            install(read(file))
    except (ValueError, OSError) as error:
        warnings.warn(f"torch_gdn: the heuristic picks prefill algorithms: {error}", stacklevel=2)
