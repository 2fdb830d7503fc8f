"""Reads what the files of a quantised model hold, from their headers alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

Sizes = tuple[int, ...]


@dataclass
class Target:
    """A parameter of the model, and the shapes of the files' tensors that make it, by source pattern."""

    name: str
    sources: dict[str, list[Sizes]] = field(default_factory=dict)

    def shape(self, ending: str) -> Sizes | None:
        """Returns the shape of the first tensor whose name ends so."""
        found = next((shapes for source, shapes in self.sources.items() if source.rpartition(".")[2] == ending), None)
        return found[0] if found else None


def shapes_in(files: Iterable[str] | None) -> dict[str, Sizes]:
    """Returns the shapes of all tensors by name.

    Raises:
        ValueError: files that are not safetensors, or none.
    """
    found: dict[str, Sizes] = {}
    for path in files or ():
        if not str(path).endswith(".safetensors"):
            raise ValueError(f"from_pretrained: expected safetensors files of a quantised model, got {path}")
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        found |= {name: tuple(x["shape"]) for name, x in header.items() if name != "__metadata__"}
    if not found:
        raise ValueError("from_pretrained: expected the files of a quantised model, got a state dict or no file")
    return found
