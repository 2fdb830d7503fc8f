"""Chooses between plain steps and steps with drafts by timing both, for each model and device.

Drafts pay on one chip and not on another, and for one text and not for another. The first tokens of a process are
generated in short segments of either way in turn. The faster way then runs, and the other is looked at now and again.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torch_gdn import _files

PLAIN, DRAFTED = "plain", "drafted"
FIRST = 64  # tokens of a process that compare both ways
SEGMENT = 8  # tokens of one way while they are compared
AGAIN = 512  # tokens of the faster way before the other is looked at again
MUCH_SLOWER = 1.25  # times as slow after two segments of each way: the comparison ends early
KEPT = ("seconds", "proposed", "accepted")  # of a choice, in the tuning cache

clock: Callable[[], float] = time.perf_counter
choices: dict[tuple[str, str], Choice] = {}  # by model and device


@dataclass
class Choice:
    """What was measured of one model on one device."""

    seconds: dict[str, float] = field(default_factory=dict)  # per token, by way
    proposed: int = 0
    accepted: int = 0
    compared: dict[str, int] = field(default_factory=lambda: {PLAIN: 0, DRAFTED: 0})  # tokens of the first comparison
    is_chosen: bool = False
    since: int = 0  # tokens of the faster way since the other was looked at

    @property
    def faster(self) -> str:
        return min((DRAFTED, PLAIN), key=lambda way: self.seconds.get(way, float("inf")))

    def next_segment(self) -> tuple[str, int]:
        """Returns the way that runs next, and how many tokens."""
        if not self.is_chosen:
            return min((DRAFTED, PLAIN), key=lambda way: self.compared[way]), SEGMENT
        if self.since < AGAIN:
            return self.faster, AGAIN - self.since
        return (PLAIN if self.faster == DRAFTED else DRAFTED), SEGMENT

    def add(self, way: str, tokens: int, timed: int, seconds: float, proposed: int = 0, accepted: int = 0) -> bool:
        """Takes a segment of `tokens` tokens, of which `timed` took `seconds`. Returns whether it ends a comparison."""
        self.proposed += proposed
        self.accepted += accepted
        was_faster = way == self.faster
        if timed:
            per_token = seconds / timed
            before = self.compared[way] if not self.is_chosen else 0
            old = self.seconds.get(way, per_token) if before else per_token
            self.seconds[way] = (old * before + per_token * tokens) / (before + tokens)
        if not self.is_chosen:
            self.compared[way] += tokens
            self.is_chosen = sum(self.compared.values()) >= FIRST or self.is_clear()
            return self.is_chosen
        if was_faster and self.since < AGAIN:
            self.since += tokens
            return False
        self.since = 0
        return True

    def is_clear(self) -> bool:
        enough = min(self.compared.values()) >= 2 * SEGMENT and len(self.seconds) == 2
        return enough and self.seconds[DRAFTED] > MUCH_SLOWER * self.seconds[PLAIN]

    def __str__(self) -> str:
        if not self.is_chosen:
            return "comparing plain steps and drafts"
        rate = f", {self.accepted / self.proposed:.0%} accepted" if self.proposed else ""
        return f"{self.faster}: {', '.join(f'{way} {1e3 * x:.1f} ms' for way, x in self.seconds.items())} a token{rate}"


def choice_of(model: str, device: torch.device) -> Choice:
    """Returns the choice for a model on a device. The first one of a process begins with what the tuning cache has."""
    key = model, device_name(device)
    if key not in choices:
        row = None
        try:
            row = kept().get(key[1], {}).get(model)
        except (ValueError, OSError) as error:
            warnings.warn(f"torch_gdn: drafts are measured anew: {error}", stacklevel=2)
        choices[key] = Choice(**row, is_chosen=True) if row else Choice()
    return choices[key]


def keep(model: str, device: torch.device) -> None:
    """Writes the choice to the tuning cache, if both ways were timed."""
    result = choice_of(model, device)
    if len(result.seconds) < 2:
        return
    try:
        if (file := _files.tuning_file()) is not None:
            table = kept()
            row = {name: value for name, value in asdict(result).items() if name in KEPT}
            table.setdefault(device_name(device), {})[model] = row
            _files.write_parts(file, {"drafts": table})
    except (ValueError, OSError) as error:
        warnings.warn(f"torch_gdn: the choice of drafts is not kept: {error}", stacklevel=2)


def kept() -> dict[str, dict[str, Any]]:
    """Returns what the tuning cache has of choices, by device and model.

    Raises:
        ValueError: If `keep` did not write it.
    """
    file = _files.tuning_file()
    devices = _files.read_parts(file).get("drafts", {}) if file is not None and file.is_file() else {}
    rows = [row for models in devices.values() for row in models.values()] if is_table(devices) else [None]
    for row in rows:
        if not (isinstance(row, dict) and row.keys() == set(KEPT) and is_seconds(row["seconds"])):
            raise ValueError(f"{file}: drafts: expected {', '.join(KEPT)} by device and model, got {row!r}")
    return dict(devices)


def is_table(devices: Any) -> bool:
    return isinstance(devices, dict) and all(isinstance(models, dict) for models in devices.values())


def is_seconds(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {PLAIN, DRAFTED}
        and all(isinstance(x, float) and x > 0 for x in value.values())
    )


def device_name(device: torch.device) -> str:
    return _files.key() if device.type == "mps" else f"{device.type}, {torch.get_num_threads()} threads"
