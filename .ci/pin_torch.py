"""`python .ci/pin_torch.py 2.14.1` changes ./pyproject.toml into that of a wheel built with this torch.

The wheel requires the minor version of torch that its extension loads with. If that is not the newest, the project's
version ends in, say, +torch2.14. Wheels of one release then have different names. PyPI refuses such versions, so it
gets only one torch.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RANGE = re.compile(r'"torch>=2\.(\d+),<2\.(\d+)"')
VERSION = re.compile(r'^(version = "[^"+]+)"$', re.MULTILINE)


def pinned(text: str, torch: str) -> str:
    first, after_last = map(int, RANGE.findall(text)[0])
    result = re.fullmatch(r"2\.(\d+)\.\d+", torch)
    if not result or not first <= int(result[1]) < after_last:
        raise SystemExit(
            f"pin_torch: expected torch 2.{first} to 2.{after_last - 1}, with its patch level, got {torch}"
        )
    minor = int(result[1])
    text = RANGE.sub(f'"torch>=2.{minor},<2.{minor + 1}"', text)
    if minor == after_last - 1:
        return text
    return VERSION.sub(rf'\1+torch2.{minor}"', text, count=1)


if __name__ == "__main__":
    path = Path("pyproject.toml")
    path.write_text(pinned(path.read_text(), sys.argv[1]))
