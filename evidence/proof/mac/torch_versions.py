"""Checks that the extension compiles and links with other torch releases, by the headers of their macOS wheels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.proof.checks import Progress
from evidence.proof.mac import build as mac_build
from evidence.proof.mac import symbols as mac_symbols
from evidence.proof.mac import system_stubs, wheels
from evidence.proof.mac.extension import mac_extension
from evidence.proof.mac.macho import read
from evidence.proof.reasons import Unavailable


@dataclass(frozen=True)
class Verdict:
    """One line of the table. `problems` has the compiler's and the linker's output."""

    version: str
    unavailable: str
    compiled: int
    sources: int
    problems: tuple[str, ...]

    @property
    def links(self) -> bool:
        return not self.unavailable and self.compiled == self.sources and not self.problems

    def __str__(self) -> str:
        if self.unavailable:
            return f"torch {self.version}: no wheel: {self.unavailable}"
        links = "links" if self.links else "does not link"
        return f"torch {self.version}: {self.compiled} of {self.sources} sources compile, {links}"


def mac_only_sources() -> tuple[str, ...]:
    """Returns the sources that use Metal and PyTorch's mps, which a torch release is most likely to break."""
    return tuple(source for source in mac_extension().sources if source.startswith("csrc/metal/"))


def _undefined(torch: wheels.Wheel, objects: Sequence[Path]) -> list[str]:
    """Returns PyTorch symbols that the objects need and that neither they nor the wheel define. Nothing is linked."""
    images = [read(path) for path in objects]
    defined = frozenset().union(*(image.exports for image in images))
    supplied = frozenset().union(*(read(path).exports for path in mac_build.torch_libraries(torch)))
    needed = {symbol for image in images for symbol in image.undefined if symbol.startswith(("__ZN2at", "__ZNK2at"))}
    return sorted(needed - defined - supplied)


def _link(torch: wheels.Wheel, objects: dict[str, Path], directory: Path) -> list[str]:
    images = mac_build.apple_built_images(torch, wheels.mlx_metal())
    system = system_stubs.system_symbols(images)
    try:
        module = mac_build.link(torch, list(objects.values()), directory, system)
    except mac_build.BuildError as error:
        return error.problems
    image = read(module)
    return mac_symbols.check_imports(image, images, system).problems + mac_symbols.check_threads(image).problems


def judge(version: str, sources: Sequence[str], progress: Progress) -> Verdict:
    """Compiles `sources` with this torch's headers, then links them if they are all of the module's."""
    try:
        torch = wheels.torch(version)
    except Unavailable as reason:
        return Verdict(version, str(reason), 0, len(sources), ())
    progress.expect(len(sources))
    directory = mac_build.build_directory(torch)
    with wheels.locked(directory):
        objects, errors = mac_build.compile_sources(
            torch, sources, directory, lambda source: progress.step(f"torch {version}: {source}")
        )
        problems = [mac_build.first_error(words) for words in errors.values()]
        if not errors and set(sources) == set(mac_extension().sources):
            problems += _link(torch, objects, directory)
        elif not errors:
            problems += [f"the wheel has no {symbol}" for symbol in _undefined(torch, list(objects.values()))]
    return Verdict(version, "", len(objects), len(sources), tuple(problems))
