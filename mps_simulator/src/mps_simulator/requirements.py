"""Lists what a build needs from the system: clang, the Objective-C and blocks run times, and Boost.

`python -m mps_simulator.requirements` prints the command that installs what is missing, if anything is.
.ci/system-packages runs this file before anything is installed, so it imports nothing but Python's own modules.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

OLDEST, NEWEST = 19, 30  # versions of clang to look for; we tested 19
GCC_DIRECTORIES = ("/usr/lib/gcc", "/usr/lib64/gcc", "/usr/local/lib/gcc")
HEADERS = {"blocks": "Block.h", "boost": "boost/context/fiber.hpp"}
PACKAGES = {  # we tested Debian's names, but not those of Fedora and Arch
    "apt-get install": {
        "c++": "g++",
        "venv": "python3-venv",
        "python": "python3-dev",
        "clang": "clang-19",
        "objective-c": "libobjc-{gcc}-dev",
        "blocks": "libblocksruntime-dev",
        "boost": "libboost-context-dev",
    },
    "dnf install": {
        "c++": "gcc-c++",
        "venv": "python3",
        "python": "python3-devel",
        "clang": "clang",
        "objective-c": "gcc-objc",
        "blocks": "libblocksruntime-devel",
        "boost": "boost-devel",
    },
    "pacman -S": {
        "c++": "gcc",
        "venv": "python",
        "python": "python",
        "clang": "clang",
        "objective-c": "gcc-objc",
        "blocks": "libdispatch",
        "boost": "boost",
    },
}
DEVICE = ("python", "clang", "objective-c", "blocks", "boost")  # what the simulated device needs


def clang() -> str:
    """Returns the command of a C++ clang that is new enough, or "" if there is none."""
    versioned = (f"clang++-{version}" for version in range(OLDEST, NEWEST))
    return next(filter(shutil.which, versioned), "") or ("clang++" if major_version("clang++") >= OLDEST else "")


def major_version(compiler: str) -> int:
    """Returns the compiler's major version, or 0 if there is no such compiler."""
    if not shutil.which(compiler):
        return 0
    printed = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout
    version = printed.split(".")[0].strip()
    return int(version) if version.isdigit() else 0


def gcc_directory() -> Path | None:
    """Returns GCC's newest folder with Objective-C headers, which clang does not search."""
    headers = (header for root in GCC_DIRECTORIES for header in Path(root).glob("*/*/include/objc/objc.h"))
    result = [header.parents[2] for header in headers]
    return max(result, key=lambda directory: int(directory.name.split(".")[0]), default=None)


def missing_headers() -> list[str]:
    """Asks a compiler for the header, because it also looks outside /usr/include (CPATH)."""
    compiler = clang() or shutil.which("g++")
    if not compiler:
        return list(HEADERS)
    program = "".join(f"#if !__has_include(<{header}>)\n{kind}\n#endif\n" for kind, header in HEADERS.items())
    command = [compiler, "-E", "-P", "-x", "c++", "-"]
    return subprocess.run(command, input=program, capture_output=True, text=True, check=True).stdout.split()


def missing() -> list[str]:
    """Returns the missing requirements, by their names in PACKAGES."""
    on_device = {
        "c++": shutil.which("g++"),
        "venv": importlib.util.find_spec("ensurepip"),
        "python": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "clang": clang(),
        "objective-c": gcc_directory(),
    }
    return [kind for kind, result in on_device.items() if not result] + missing_headers()


def install_command(kinds: Iterable[str]) -> str:
    """Returns the command for this system's package manager. If it is unknown, uses Debian's command."""
    manager = next((each for each in PACKAGES if shutil.which(each.split()[0])), "apt-get install")
    gcc = major_version("g++")
    names = dict.fromkeys(PACKAGES[manager][kind] for kind in kinds)
    # libobjc's name contains g++'s version. If g++ is missing too, a second run names libobjc once g++ is installed.
    return " ".join([manager, *(name.format(gcc=gcc) for name in names if gcc or "{gcc}" not in name)])


if __name__ == "__main__":
    needed = missing()
    if needed:
        print(install_command(needed))
