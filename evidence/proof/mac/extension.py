"""Finds what setup.py would build on a Mac: its sources and flags, with the platform set to macOS."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]

# Modules that ask for the platform on import come first. torch's build_ext adds its own flags to those of setup.py, and
# then calls setuptools', which would call the compiler.
_PROGRAM = """
import json, sys
from distutils.core import run_setup
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import BuildExtension, CppExtension

def tell(self):
    (extension,) = self.extensions
    print(json.dumps({
        "name": extension.name,
        "sources": extension.sources,
        "include_directories": extension.include_dirs,
        "compile_flags": extension.extra_compile_args["cxx"],
        "libraries": extension.libraries,
        "link_flags": extension.extra_link_args,
    }))

system, sys.platform = sys.platform, "darwin"
distribution = run_setup("setup.py", stop_after="init")
sys.platform = system
command = distribution.get_command_obj("build_ext")
command.ensure_finalized()
command.setup_shlib_compiler()
command.compiler = command.shlib_compiler
build_ext.build_extensions = tell
command.build_extensions()
"""


@dataclass(frozen=True)
class MacExtension:
    name: str
    sources: tuple[str, ...]  # relative to the checkout
    include_directories: tuple[Path, ...]  # ours; PyTorch's come from the wheel
    compile_flags: tuple[str, ...]
    libraries: tuple[str, ...]
    link_flags: tuple[str, ...]


def own_directories(directories: Iterable[str], checkout: Path, environment: Path) -> tuple[Path, ...]:
    """Keeps directories of the checkout, but not of an environment in it (.venv), whose PyTorch is not the Mac's."""
    paths = [Path(directory) for directory in directories]
    return tuple(path for path in paths if path.is_relative_to(checkout) and not path.is_relative_to(environment))


@functools.cache
def mac_extension() -> MacExtension:
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        raise RuntimeError(f"setup.py cannot be asked what a Mac builds:\n{finished.stderr}")
    facts = json.loads(finished.stdout.splitlines()[-1])
    return MacExtension(
        name=facts["name"],
        sources=tuple(facts["sources"]),
        include_directories=own_directories(facts["include_directories"], CHECKOUT, Path(sys.prefix)),
        compile_flags=tuple(facts["compile_flags"]),
        libraries=tuple(facts["libraries"]),
        link_flags=tuple(facts["link_flags"]),
    )
