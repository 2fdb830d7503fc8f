"""States the version of these sources: a checkout's pyproject.toml has it, an installed wheel's metadata otherwise.

A checkout does not ask for metadata, which may be an older build's or another checkout's.
"""

import re
from importlib.metadata import version
from pathlib import Path

_project = Path(__file__).resolve().parent.parent / "pyproject.toml"
_text = _project.read_text(encoding="utf-8") if _project.is_file() else ""
_stated = re.search(r'^name = "torch_gdn"\nversion = "(.+)"$', _text, re.MULTILINE)
__version__ = _stated[1] if _stated else version("torch_gdn")
