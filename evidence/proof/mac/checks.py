"""Defines the checks of the Mac build, as the table shows them."""

from __future__ import annotations

import functools

from evidence.proof.checks import Finding, Progress, check
from evidence.proof.mac import apple_headers, header_faults, system_stubs, torch_versions, wheels
from evidence.proof.mac import build as mac_build
from evidence.proof.mac import symbols as mac_symbols
from evidence.proof.mac import wheel as mac_wheel
from evidence.proof.mac.extension import mac_extension
from evidence.proof.mac.macho import Image, read
from evidence.proof.reasons import Blocked

PYTHON_SOURCE = "csrc/bindings.cpp"
_builds: dict[str, mac_build.Build | mac_build.BuildError] = {}


def built(progress: Progress) -> mac_build.Build:
    """Returns the extension for the torch that it asks for. A process builds it only once, and keeps the error of a
    failure.
    """
    if wheels.TORCH_VERSION not in _builds:
        torch, mlx = wheels.torch(), wheels.mlx_metal()
        progress.expect(len(mac_extension().sources))
        try:
            _builds[torch.version] = mac_build.build(torch, [mlx], progress.step)
        except mac_build.BuildError as error:
            _builds[torch.version] = error
    build = _builds[wheels.TORCH_VERSION]
    if isinstance(build, mac_build.BuildError):
        raise build
    return build


def needed_build(progress: Progress) -> mac_build.Build:
    """Returns the same for checks of the built extension. Only mac-build reports that it does not build."""
    try:
        return built(progress)
    except mac_build.BuildError as error:
        raise Blocked("the extension does not build") from error


@functools.cache
def torch_library() -> Image:
    return read(wheels.torch().root / "torch" / "lib" / "libtorch_cpu.dylib")


@functools.cache
def apple_reference() -> apple_headers.Reference:
    return apple_headers.fetch_reference()


@check("mac-build", "the extension compiles and links for arm64 macOS 14; CPython and OpenMP define all other symbols")
def mac_build_check(progress: Progress) -> Finding:
    try:
        build = built(progress)
    except mac_build.BuildError as error:
        return Finding(len(mac_extension().sources), error.problems)
    finding = mac_symbols.check_python_objects(build.objects, PYTHON_SOURCE)
    finding.notes.append(f"torch {build.torch.version}, {wheels.PYTHON_TAG}")
    return finding


@check("mac-symbols", "every symbol that it needs is in torch's wheel, or is one of macOS that torch or MLX uses too")
def mac_symbols_check(progress: Progress) -> Finding:
    build = needed_build(progress)
    images = mac_build.apple_built_images(build.torch, wheels.mlx_metal())
    finding = mac_symbols.check_imports(build.image, images, system_stubs.system_symbols(images))
    threads = mac_symbols.check_threads(build.image)
    return Finding(finding.cases + threads.cases, finding.problems + threads.problems, finding.notes)


@check("mac-selectors", "every message it sends has a selector of Apple's")
def mac_selectors_check(progress: Progress) -> Finding:
    known = apple_reference().selectors() | apple_headers.names_used_by(torch_library())
    return mac_symbols.check_selectors(needed_build(progress).image, known)


@check("mac-loading", "load commands, rpath and signature are right, and nothing in it names the machine that built it")
def mac_loading_check(progress: Progress) -> Finding:
    build = needed_build(progress)
    commands = mac_symbols.check_load_commands(build.image)
    paths = mac_symbols.check_no_build_paths(build.module)
    return Finding(commands.cases + paths.cases, commands.problems + paths.problems)


@check("mac-wheel", "the macosx_14_0_arm64 wheel has the right tags, contents and load commands, and pip accepts it")
def mac_wheel_check(progress: Progress) -> Finding:
    build = needed_build(progress)
    return mac_wheel.check_wheel(mac_wheel.assemble(build, wheels.cache_directory() / "mac"), build.torch)


@check("apple-headers", "the declarations in our stub headers of Metal and Foundation agree with Apple's")
def apple_headers_check(progress: Progress) -> Finding:
    names = apple_headers.names_used_by(torch_library())
    comparison = apple_headers.compare(apple_headers.stubs(), apple_reference(), names)
    return apple_headers.judge(comparison)


@check("apple-headers-faults", "a wrong value, type, argument count or name in a stub header fails the check above")
def apple_headers_faults_check(progress: Progress) -> Finding:
    return header_faults.check_faults(apple_reference(), apple_headers.names_used_by(torch_library()))


NEWER = " and ".join(wheels.NEWER_TORCH_VERSIONS)


@check("torch-versions", f"it also compiles and links with torch {NEWER}, and their wheels have every symbol")
def torch_versions_check(progress: Progress) -> Finding:
    sources = mac_extension().sources
    verdicts = [torch_versions.judge(version, sources, progress) for version in wheels.NEWER_TORCH_VERSIONS]
    problems = [f"torch {verdict.version}: {each}" for verdict in verdicts for each in verdict.problems]
    cases = sum(verdict.sources for verdict in verdicts if not verdict.unavailable)
    return Finding(cases, problems, [str(verdict) for verdict in verdicts])
