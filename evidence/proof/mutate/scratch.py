"""A copy of the checkout in which faults are planted, so that the checkout itself never has one."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from evidence.proof.mutate.faults import CHECKOUT, Fault, read_table
from evidence.proof.mutate.forks import Forks

EXTENSION = "torch_gdn/_C*.so"
SECONDS = 1800  # for one run of the tests; a kernel may never end


class NotBuilt(RuntimeError):
    """Raised with the compiler's message."""


class Late(RuntimeError):
    """Raised with what a program had printed when its time was over."""


@dataclass(frozen=True)
class Finished:
    status: int
    output: str


class Scratch:
    def __init__(self, folder: Path, checkout: Path = CHECKOUT, name: str = "tree", seconds: int = 0) -> None:
        self.checkout = checkout
        self.seconds = seconds or SECONDS
        self.sweeps = "all"  # every case of the tests' sweeps, or a seed for a sample
        self.passing = set[tuple[str, str]]()  # tests that pass without a fault, and their sweeps
        self.failing = set[str]()  # tests that fail without a fault
        self.tree = folder / name
        self._kept = folder / "extensions"
        self._built = folder / f"{name}.built"
        self._output = folder / f"{name}.output"
        self._forks = Forks()

    def refresh(self) -> None:
        """Makes the tree equal to the checkout. A file that changes gets newer than what was built from it."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self.checkout, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        files = {name for name in listed if name and (self.checkout / name).is_file()}
        for name in files:
            self._copy(name)
        if self.tree.joinpath("csrc").exists():
            self._remove_strangers(files)
        self._take_extension()

    def _copy(self, name: str) -> None:
        source, target = self.checkout / name, self.tree / name
        if target.exists() and target.read_bytes() == source.read_bytes():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    def _remove_strangers(self, files: set[str]) -> None:
        for folder in ("csrc", "shaders", "tests"):
            for path in (self.tree / folder).rglob("*.*"):
                if path.suffix != ".pyc" and path.is_file() and str(path.relative_to(self.tree)) not in files:
                    path.unlink()

    def _take_extension(self) -> None:
        """Takes the checkout's own extension if it was built after the checkout's last change."""
        built = next(self.checkout.glob(EXTENSION), None)
        sources = [self.checkout / path.relative_to(self.tree) for path in self._extension_sources()]
        if built and all(path.stat().st_mtime <= built.stat().st_mtime for path in sources):
            self._keep(built)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self.tree / fault.file
        clean = path.read_text()
        write_source(path, fault.plant(clean))
        try:
            yield
        finally:
            write_source(path, clean)

    def build(self) -> None:
        """Builds torch_gdn._C of the tree as it is. The simulated device compiles everything else at first use."""
        if not (self.tree / "setup.py").exists() or self._built_of() == self._digest():
            return
        kept = self._kept / self._digest()
        if kept.exists():
            shutil.copyfile(kept, self._extension())
        else:
            finished = self.run("setup.py", "--quiet", "build_ext", "--inplace")
            if finished.status != 0:
                raise NotBuilt(finished.output)
        self._built.write_text(self._digest())

    def build_clean(self) -> None:
        """Keeps the files of a tree without a fault, to restore them after a fault."""
        self.build()
        if built := next(self.tree.glob(EXTENSION), None):
            self._keep(built)

    def run(self, *arguments: str) -> Finished:
        """Runs Python in the tree, which sees the tree's packages and no others of these names."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(self.tree / each) for each in ("", "check", "engines")),
            "COLUMNS": "1000",
            "TORCH_GDN_SWEEPS": self.sweeps,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        status = self._forks.run(arguments, self.tree, environment, self._output, self.seconds)
        output = self._output.read_text(errors="replace")
        if status is None:
            raise Late(output)
        return Finished(status, output)

    def _keep(self, extension: Path) -> None:
        self._kept.mkdir(parents=True, exist_ok=True)
        kept = self._kept / self._digest()
        if not kept.exists():
            for old in self._kept.iterdir():
                old.unlink()
            shutil.copyfile(extension, kept)

    def _extension(self) -> Path:
        return self.tree / "torch_gdn" / next(self.checkout.glob(EXTENSION)).name

    def _built_of(self) -> str:
        return self._built.read_text() if self._built.exists() and any(self.tree.glob(EXTENSION)) else ""

    def _extension_sources(self) -> list[Path]:
        """Returns the sources of torch_gdn._C: csrc/ without the simulated device's part, and headers of shaders."""
        metal_half = sources_of_simulated_device(self.tree)
        sources = [path for path in sorted((self.tree / "csrc").rglob("*.*")) if path not in metal_half]
        return [*sources, *included_shaders(self.tree, sources)]

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for path in self._extension_sources():
            digest.update(str(path.relative_to(self.tree)).encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()


def write_source(path: Path, text: str) -> None:
    path.write_text(text)
    # Python confuses the bytecode of two versions of equal size that are written within a second.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def sources_of_simulated_device(tree: Path) -> set[Path]:
    """Returns what pyproject.toml tells mps_simulator/project.py to build."""
    project = tree / "pyproject.toml"
    tables = read_table(project)["tool"]["mps_simulator"]["load"] if project.exists() else []
    result: set[Path] = set()
    for table in tables:
        result |= {path for pattern in table["sources"] for path in tree.glob(pattern)}
        result -= {tree / name for name in table.get("exclude", ())}
    return result


def included_shaders(tree: Path, sources: Sequence[Path]) -> list[Path]:
    """Returns the headers under shaders/ that these files include, directly or not."""
    result: dict[Path, None] = {}
    left = list(sources)
    while left:
        for name in re.findall(r'^#include "([^"]+)"', left.pop().read_text(), flags=re.MULTILINE):
            path = tree / "shaders" / name.removeprefix("shaders/")
            if path.is_file() and path not in result:
                result[path] = None
                left.append(path)
    return sorted(result)
