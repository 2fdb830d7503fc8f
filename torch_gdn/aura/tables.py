"""Reads this folder's tables of numbers."""

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


def require(argument: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{argument}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


@cache
def read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())
