"""Fetches the public wheels that the checks need, macOS arm64 builds of torch and MLX, from pip's configured index."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from evidence.proof.reasons import Unavailable

TORCH_VERSION = "2.13.0"  # the version that torch_gdn is tested with
NEWER_TORCH_VERSIONS = ("2.14.1", "2.15.0")  # pyproject.toml accepts them too
MLX_METAL_VERSION = "0.32.4"
PLATFORM = "macosx_14_0_arm64"
PYTHON_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"

# Only the parts of a wheel that some check reads are unpacked, without MLX's 147 MB of compiled kernels.
UNPACKED = {
    "torch": ("torch/include/", "torch/lib/", "torch/_C."),
    "mlx-metal": ("mlx/include/", "mlx/lib/libmlx.dylib"),
}
# A torch wheel is 110 to 140 MB and unpacks to 440 to 540 MB.
SPACE_NEEDED = 700 << 20


@dataclass(frozen=True)
class Wheel:
    project: str
    version: str
    file: Path
    root: Path  # where the contents that UNPACKED names are

    def names(self) -> list[str]:
        """Returns every file in the wheel, unpacked or not."""
        with zipfile.ZipFile(self.file) as archive:
            return archive.namelist()


def cache_directory() -> Path:
    """Returns $TORCH_GDN_CACHE or ~/.cache/torch_gdn, as for everything that is built."""
    named = os.environ.get("TORCH_GDN_CACHE")
    return (Path(named).expanduser() if named else Path.home() / ".cache" / "torch_gdn").absolute()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lets one process in at a time, because tests run in several."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _downloaded(directory: Path, project: str, version: str) -> Path | None:
    for file in directory.glob("*.whl"):
        try:
            name, file_version, _, tags = parse_wheel_filename(file.name)
        except InvalidWheelFilename:
            continue
        interpreters = {tag.interpreter for tag in tags}
        if name == project and str(file_version) == version and interpreters & {PYTHON_TAG, "py3"}:
            return file
    return None


def _check_space(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < SPACE_NEEDED:
        raise Unavailable(f"{directory} has {free >> 20} MB free, a wheel and its contents need {SPACE_NEEDED >> 20}")


def _download(directory: Path, project: str, version: str) -> Path:
    _check_space(directory)
    command = [sys.executable, "-m", "pip", "download", f"{project}=={version}", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--platform", PLATFORM, "--implementation", "cp", "--abi", PYTHON_TAG]
    command += ["--python-version", f"{sys.version_info.major}.{sys.version_info.minor}", "--dest", str(directory)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    file = _downloaded(directory, project, version)
    if file is None:
        reason = (finished.stderr.strip() or "pip gave no message").splitlines()[-1]
        raise Unavailable(f"no wheel of {project} {version} for {PYTHON_TAG} on {PLATFORM}: {reason}")
    return file


def _unpack(file: Path, project: str) -> Path:
    root = file.with_suffix("")
    if not root.exists():
        _check_space(file.parent)
        unfinished = root.with_name(root.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with zipfile.ZipFile(file) as archive:
            wanted = [
                name for name in archive.namelist() if name.startswith(UNPACKED[project]) or ".dist-info/" in name
            ]
            archive.extractall(unfinished, wanted)
        unfinished.rename(root)
    return root


def fetch(project: str, version: str) -> Wheel:
    """Returns the wheel, from the cache or else from the index. Unavailable says why it is missing."""
    directory = cache_directory() / "wheels"
    with locked(directory):
        file = _downloaded(directory, project, version) or _download(directory, project, version)
        return Wheel(project, version, file, _unpack(file, project))


def torch(version: str = TORCH_VERSION) -> Wheel:
    return fetch("torch", version)


def mlx_metal() -> Wheel:
    return fetch("mlx-metal", MLX_METAL_VERSION)
