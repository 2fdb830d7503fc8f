"""Tests that the extension compiles and links for a Mac, and that what would fail there fails here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from evidence.proof.checks import Silent
from evidence.proof.mac import apple_headers, system_stubs, wheels
from evidence.proof.mac import build as mac_build
from evidence.proof.mac import checks as mac_checks
from evidence.proof.mac import symbols as mac_symbols
from evidence.proof.mac.extension import CHECKOUT, mac_extension, own_directories
from evidence.proof.mac.macho import FLAT, Image, read
from evidence.proof.reasons import Blocked

pytestmark = pytest.mark.xdist_group("proof")


@pytest.fixture(scope="module")
def images(torch_wheel: wheels.Wheel, mlx_wheel: wheels.Wheel) -> list[Image]:
    return mac_build.apple_built_images(torch_wheel, mlx_wheel)


@pytest.fixture(scope="module")
def system(images: list[Image]) -> dict[str, frozenset[str]]:
    return system_stubs.system_symbols(images)


def test_headers_of_an_environment_in_the_checkout_are_not_our_own() -> None:
    installed = "/checkout/.venv/lib/python3.11/site-packages/torch/include"
    directories = own_directories(["/checkout/csrc", installed], Path("/checkout"), Path("/checkout/.venv"))
    assert directories == (Path("/checkout/csrc"),)


def test_a_mac_builds_every_source() -> None:
    csrc = CHECKOUT / "csrc"
    sources = {path.relative_to(CHECKOUT).as_posix() for path in csrc.rglob("*") if path.suffix in (".cpp", ".mm")}
    assert set(mac_extension().sources) == sources


def test_every_symbol_is_there_on_a_mac(
    build: mac_build.Build, images: list[Image], system: dict[str, frozenset[str]]
) -> None:
    finding = mac_symbols.check_imports(build.image, images, system)
    assert finding.problems == []
    assert finding.cases > 100


def test_only_cpython_and_openmp_are_left_open(build: mac_build.Build, images: list[Image]) -> None:
    open_symbols = [symbol.name for symbol in build.image.imports if symbol.library == FLAT]
    assert open_symbols
    openmp = mac_symbols.openmp_symbols(images)
    assert [name for name in open_symbols if not mac_symbols.is_python(name) and name not in openmp] == []


def test_cpu_ops_run_on_several_cores(build: mac_build.Build) -> None:
    assert mac_symbols.check_threads(build.image).problems == []


def test_every_message_has_a_selector_of_apples(
    build: mac_build.Build, reference: apple_headers.Reference, names: frozenset[str]
) -> None:
    finding = mac_symbols.check_selectors(build.image, reference.selectors() | names)
    assert finding.problems == []
    assert "setComputePipelineState:" in build.image.selectors


def test_only_the_bindings_use_python(build: mac_build.Build) -> None:
    assert mac_symbols.check_python_objects(build.objects, mac_checks.PYTHON_SOURCE).problems == []


def test_another_object_that_uses_python_is_found(build: mac_build.Build) -> None:
    objects = {"csrc/launch/launch.cpp": build.objects[mac_checks.PYTHON_SOURCE]}
    (problem,) = mac_symbols.check_python_objects(objects, mac_checks.PYTHON_SOURCE).problems
    assert "csrc/launch/launch.cpp uses _Py" in problem


def test_load_commands_are_right(build: mac_build.Build) -> None:
    assert mac_symbols.check_load_commands(build.image).problems == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"platform": "IOS"}, "is for IOS"),
        ({"minimum_os": (15, 0, 0)}, "needs macOS"),
        ({"flags": frozenset()}, "two-level"),
        ({"commands": ()}, "not signed"),
        ({"install_name": "/opt/build/_C.so"}, "install name"),
        ({"rpaths": ("/opt/torch/lib",)}, "rpaths"),
        ({"libraries": ("/usr/lib/libSystem.B.dylib",)}, "does not link against"),
        ({"exports": frozenset()}, "PyInit"),
    ],
)
def test_wrong_load_command_is_found(build: mac_build.Build, change: dict[str, object], said: str) -> None:
    image = dataclasses.replace(build.image, **change)  # type: ignore[arg-type]
    (problem,) = mac_symbols.check_load_commands(image).problems
    assert said in problem


def test_unknown_library_is_found(build: mac_build.Build) -> None:
    image = dataclasses.replace(build.image, libraries=(*build.image.libraries, "/usr/lib/libgcc_s.1.dylib"))
    (problem,) = mac_symbols.check_load_commands(image).problems
    assert "libgcc_s" in problem


def test_nothing_tells_where_it_was_built(build: mac_build.Build) -> None:
    assert mac_symbols.check_no_build_paths(build.module).problems == []


def test_path_of_the_build_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module"
    file.write_bytes(b"\0" + str(CHECKOUT / "csrc" / "ops" / "ops.cpp").encode() + b"\0")
    assert str(CHECKOUT) in " ".join(mac_symbols.check_no_build_paths(file).problems)


def test_misspelt_selector_is_found(build: mac_build.Build, reference: apple_headers.Reference) -> None:
    image = dataclasses.replace(build.image, selectors=("setBufer:offset:atIndex:",))
    (problem,) = mac_symbols.check_selectors(image, reference.selectors()).problems
    assert "setBufer:offset:atIndex:" in problem


MPS = "#import <Foundation/Foundation.h>\n#import <Metal/Metal.h>\n#include <ATen/mps/MPSStream.h>\n"


def compiled(torch: wheels.Wheel, directory: Path, source: str) -> tuple[list[Path], str]:
    """Returns the object of a small Objective-C++ file, or the compiler's errors."""
    path = directory / "planted.mm"
    path.write_text(source)
    objects, errors = mac_build.compile_sources(torch, [str(path)], directory / "objects")
    return list(objects.values()), "".join(errors.values())


def problems_of_linked(
    torch: wheels.Wheel, directory: Path, source: str, images: list[Image], system: dict[str, frozenset[str]]
) -> list[str]:
    objects, errors = compiled(torch, directory, source)
    assert errors == ""
    module = mac_build.link(torch, objects, directory, system)
    return mac_symbols.check_imports(read(module), images, system).problems


LACKED = {  # names that the torch wheel, or macOS 14's standard library, lacks
    "flush_everything": "namespace at::mps { void flush_everything(MPSStream*); }\n"
    "void use() { at::mps::flush_everything(at::mps::getCurrentMPSStream()); }\n",
    # By its symbol, because libc++'s headers define the function inline where macOS lacks it.
    "__hash_memory": "#include <cstddef>\n"
    'size_t hash_memory(const void*, size_t) noexcept asm("__ZNSt3__113__hash_memoryEPKvm");\n'
    "size_t use(const void* data) { return hash_memory(data, 8); }\n",
}


@pytest.mark.parametrize("name", LACKED)
def test_call_of_what_a_library_lacks_is_found(
    torch_wheel: wheels.Wheel, tmp_path: Path, images: list[Image], system: dict[str, frozenset[str]], name: str
) -> None:
    (problem,) = problems_of_linked(torch_wheel, tmp_path, MPS + LACKED[name], images, system)
    assert name in problem


def test_queue_type_that_is_not_apples_is_found(
    torch_wheel: wheels.Wheel, tmp_path: Path, images: list[Image], system: dict[str, frozenset[str]]
) -> None:
    """The type behind dispatch_queue_t is part of a mangled name. Plain C has another type, and so another name."""
    use = (
        "void use() {\n  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();\n"
        "  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{});\n}\n"
    )
    assert problems_of_linked(torch_wheel, tmp_path, MPS + use, images, system) == []
    plain = "#define OS_OBJECT_USE_OBJC 0\n" + MPS + use
    (problem,) = problems_of_linked(torch_wheel, tmp_path, plain, images, system)
    assert "dispatch_sync_with_rethrow" in problem


def test_message_that_metal_does_not_take_is_refused(torch_wheel: wheels.Wheel, tmp_path: Path) -> None:
    source = MPS + "void use(id<MTLComputeCommandEncoder> encoder) { [encoder setBuffer:nil atIndex:0]; }\n"
    _, errors = compiled(torch_wheel, tmp_path, source)
    assert "setBuffer:atIndex:" in errors


def test_extension_that_does_not_build_is_one_problem(
    torch_wheel: wheels.Wheel, mlx_wheel: wheels.Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> mac_build.Build:
        raise mac_build.BuildError("csrc/ops/ops.cpp:3:1: error: expected ';'\n  quoted source\n")

    monkeypatch.setattr(mac_checks, "_builds", {})
    monkeypatch.setattr(mac_build, "build", fail)
    assert mac_checks.mac_build_check(Silent()).problems == ["csrc/ops/ops.cpp:3:1: error: expected ';'"]
    with pytest.raises(Blocked, match="does not build"):
        mac_checks.mac_symbols_check(Silent())
