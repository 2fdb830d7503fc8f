"""Puts the cross-built module into a wheel for macOS, says in the wheel how it was made, and checks the wheel.

Files and metadata are setup.py's own (build_py, dist_info). RECORD and the file's name come from the wheel package.
"""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, mac_platforms
from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelFile

from evidence.proof.checks import Finding
from evidence.proof.mac import wheels
from evidence.proof.mac.build import RPATH, Build
from evidence.proof.mac.extension import CHECKOUT
from evidence.proof.mac.macho import Image, read

BUILD_TAG = "0crossbuilt"
LABEL = "Cross-built on Linux, never run on a Mac."
LABEL_FILE = "CROSS_BUILT.txt"
LABEL_TEXT = f"""{LABEL}

The extension module in this wheel was compiled and linked for macOS on arm64 on a Linux machine, with the clang and the
linker of the ziglang package. Its symbols, load commands and Metal selectors were checked against torch's own macOS
wheel and Apple's published headers. No Mac has loaded it. `pip install .` from the sources, on the Mac, is the way to
get an extension that Apple's own compiler built.
"""


def _setup(*arguments: str) -> None:
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    finished = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{finished.stdout}{finished.stderr}")


def _label(metadata: Path) -> None:
    """Says it in METADATA where pip and package listings show it: in the summary, and above the description."""
    head, _, description = metadata.read_text().partition("\n\n")
    lines = [f"Summary: [{LABEL}] {line[9:]}" if line.startswith("Summary: ") else line for line in head.split("\n")]
    metadata.write_text("\n".join(lines) + f"\n\n> {LABEL}\n\n{description}")


def assemble(build: Build, directory: Path) -> Path:
    """Writes torch_gdn-VERSION-0crossbuilt-cp3XX-cp3XX-macosx_14_0_arm64.whl into `directory`."""
    with tempfile.TemporaryDirectory() as temporary:
        tree, information = Path(temporary, "tree"), Path(temporary, "information")
        information.mkdir()
        _setup("egg_info", "--egg-base", str(information), "build_py", "--build-lib", str(tree))
        _setup("dist_info", "--output-dir", str(tree))
        shutil.copy(build.module, tree / "torch_gdn" / build.module.name)
        (dist_info,) = tree.glob("*.dist-info")
        _label(dist_info / "METADATA")
        (dist_info / LABEL_FILE).write_text(LABEL_TEXT)
        (dist_info / "WHEEL").write_text(
            f"Wheel-Version: 1.0\nGenerator: torch_gdn proof\nRoot-Is-Purelib: false\n"
            f"Build: {BUILD_TAG}\nTag: {wheels.PYTHON_TAG}-{wheels.PYTHON_TAG}-{wheels.PLATFORM}\n\n"
        )
        name = f"{dist_info.stem}-{BUILD_TAG}-{wheels.PYTHON_TAG}-{wheels.PYTHON_TAG}-{wheels.PLATFORM}.whl"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / name
        path.unlink(missing_ok=True)
        with WheelFile(path, "w") as file:
            file.write_files(tree)
    return path


def _message(archive: zipfile.ZipFile, name: str) -> Message:
    (path,) = (each for each in archive.namelist() if each.endswith(f".dist-info/{name}"))
    return email.message_from_bytes(archive.read(path))


def _files_below(folder: Path, pattern: str = "*") -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob(pattern) if path.is_file()}


def check_tags(path: Path) -> Finding:
    """Checks that the name says what WHEEL says, and that macOS 14 takes it, as it takes torch's own wheel."""
    _, _, build, tags = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as archive:
        declared = _message(archive, "WHEEL")
    taken = {Tag(wheels.PYTHON_TAG, wheels.PYTHON_TAG, name) for name in mac_platforms((14, 0), "arm64")}
    facts = {
        f"tags are {sorted(map(str, tags))}, WHEEL has {declared.get_all('Tag')}": {str(tag) for tag in tags}
        == set(declared.get_all("Tag", [])),
        f"no Mac with macOS 14 on arm64 takes {sorted(map(str, tags))}": bool(tags & taken),
        f"build tag is {build}, WHEEL has {declared['Build']}": "".join(map(str, build)) == declared["Build"],
        "WHEEL says that it is pure Python": declared["Root-Is-Purelib"] == "false",
    }
    return Finding(len(facts), [fact for fact, true in facts.items() if not true])


def check_contents(path: Path) -> Finding:
    """Checks for the package with its shaders and one extension module, without simulator and tests, and for a right
    RECORD.
    """
    problems = []
    with WheelFile(path) as archive:
        names = archive.namelist()
        try:
            for name in names:
                archive.read(name)  # WheelFile compares each with its digest in RECORD
        except Exception as error:
            problems.append(f"RECORD: {error}")
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    if top != {"torch_gdn"}:
        problems.append(f"it installs {sorted(top)}, expected torch_gdn alone")
    expected = {f"torch_gdn/{name}" for name in _files_below(CHECKOUT / "torch_gdn", "*.py") | {"py.typed"}}
    expected |= {f"torch_gdn/shaders/{name}" for name in _files_below(CHECKOUT / "shaders") if not name.startswith(".")}
    problems += [f"{name} is missing" for name in sorted(expected - set(names))]
    modules = [name for name in names if name.endswith((".so", ".dylib", ".pyd"))]
    if len(modules) != 1 or not modules[0].startswith("torch_gdn/_C.cpython-"):
        problems.append(f"its extension modules are {modules}")
    return Finding(len(names) + len(expected), problems)


def check_label(path: Path) -> Finding:
    """Checks that the wheel says that it was cross-built and never run."""
    with zipfile.ZipFile(path) as archive:
        metadata = _message(archive, "METADATA")
        labels = [name for name in archive.namelist() if name.endswith(f".dist-info/{LABEL_FILE}")]
    facts = {
        "the file's name does not say it": "crossbuilt" in path.name,
        "the summary does not say it": LABEL in str(metadata["Summary"]),
        "the description does not begin with it": str(metadata.get_payload()).lstrip("> \n").startswith(LABEL),
        f"there is no {LABEL_FILE}": len(labels) == 1,
    }
    return Finding(len(facts), [f"cross-built: {fact}" for fact, true in facts.items() if not true])


def check_requirement(path: Path, torch: wheels.Wheel) -> Finding:
    """Checks that the torch that it asks for is the one that it was linked against."""
    with zipfile.ZipFile(path) as archive:
        required = [Requirement(each) for each in _message(archive, "METADATA").get_all("Requires-Dist", [])]
    accepted = [each for each in required if each.name == "torch" and each.marker is None]
    if len(accepted) != 1 or torch.version not in accepted[0].specifier:
        return Finding(1, [f"it requires {[str(each) for each in accepted]}, and was linked against {torch.version}"])
    return Finding(1)


def _installed_library(reference: str, wheel_names: Sequence[str]) -> str:
    """Returns where dyld finds `@rpath/NAME` from torch_gdn/ in site-packages, or "" if torch's wheel lacks it."""
    name = reference.replace("@rpath", RPATH).replace("@loader_path", "torch_gdn").replace("torch_gdn/../", "")
    return name if name in wheel_names else ""


def check_against_torch(path: Path, torch: wheels.Wheel) -> Finding:
    """Compares the module's load commands with those of torch's own module, which works on a Mac."""
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(path) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".so"))
        ours = read(Path(archive.extract(name, temporary)))
    (own,) = (torch.root / "torch").glob("_C.*.so")
    theirs = read(own)
    files = torch.names()
    problems = _differences(ours, theirs)
    references = [library for library in ours.libraries if library.startswith("@rpath/")]
    problems += [f"{each} is not where the rpath leads" for each in references if not _installed_library(each, files)]
    names = {image.install_name for image in map(read, (torch.root / "torch" / "lib").glob("*.dylib"))}
    problems += [f"no library of torch's wheel has the install name {each}" for each in references if each not in names]
    kinds = f"a {ours.file_type}, torch's own module is a {theirs.file_type}"
    note = f"{kinds}: zig's linker makes no bundles, dlopen takes both"
    return Finding(5 + 2 * len(references), problems, [note])


def _differences(ours: Image, theirs: Image) -> list[str]:
    facts = {
        f"platform {ours.platform}, torch's is {theirs.platform}": ours.platform == theirs.platform,
        f"minimum macOS {ours.minimum_os}, torch's is {theirs.minimum_os}": ours.minimum_os == theirs.minimum_os,
        "no two-level namespace, as torch's has": "TWOLEVEL" in ours.flags and "TWOLEVEL" in theirs.flags,
        f"rpaths {ours.rpaths}": all(rpath.startswith("@loader_path/") for rpath in ours.rpaths + theirs.rpaths),
        "no signature, as torch's has": "CODE_SIGNATURE" in ours.commands and "CODE_SIGNATURE" in theirs.commands,
    }
    return [fact for fact, true in facts.items() if not true]


def check_pip_takes_it(path: Path) -> Finding:
    """Checks that pip installs the wheel if it is told to install for a Mac with macOS 14."""
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--only-binary=:all:"]
        command += ["--platform", wheels.PLATFORM, "--implementation", "cp", "--abi", wheels.PYTHON_TAG]
        command += ["--no-compile", "--target", target, str(path)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        installed = _files_below(Path(target))
    if finished.returncode != 0:
        return Finding(1, [f"pip: {finished.stderr.strip()}"])
    return Finding(1, [] if any(name.startswith("torch_gdn/_C.") for name in installed) else ["pip installed no _C"])


def check_wheel(path: Path, torch: wheels.Wheel) -> Finding:
    """Runs all of the above."""
    parts = [check_tags(path), check_contents(path), check_label(path), check_requirement(path, torch)]
    parts += [check_against_torch(path, torch), check_pip_takes_it(path)]
    return Finding(
        sum(part.cases for part in parts),
        [problem for part in parts for problem in part.problems],
        [path.name, *(note for part in parts for note in part.notes)],
    )
