"""Builds torch_gdn._C and puts the shaders into the wheel; everything else is in pyproject.toml."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent.resolve()
ON_MAC = sys.platform == "darwin"

# ninja from pip lies beside the interpreter, whose environment need not be activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
# A translation unit with PyTorch's headers takes 1 to 2 GB, so not one job per core unless asked.
os.environ.setdefault("MAX_JOBS", "2")
if ON_MAC:
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")  # as torch's own wheel
    # python.org's Python would build for Intel as well, for which there is no torch, and say so in the wheel's name.
    os.environ.setdefault("ARCHFLAGS", "-arch arm64")
    os.environ.setdefault("_PYTHON_HOST_PLATFORM", f"macosx-{os.environ['MACOSX_DEPLOYMENT_TARGET']}-arm64")
# OpenMP is only compiled against, never linked: at::parallel_for, inline in torch's headers, must meet torch's own
# runtime, not a second one. Apple's compiler takes the flag for its front end alone, and omp.h from torch's wheel.
# TORCH_GDN_SANITIZE=1: errors of memory and undefined behaviour end the process (make sanitize).
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
SANITIZE = SANITIZERS if os.environ.get("TORCH_GDN_SANITIZE") == "1" else []
OPTIMISE = ["-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", *SANITIZERS] if SANITIZE else ["-O3", "-g0"]
OPENMP = ["-Xpreprocessor", "-fopenmp"] if ON_MAC else ["-fopenmp"]
COMPILE_FLAGS = ["-std=c++20", *OPTIMISE, "-Wall", *OPENMP, *(["-fno-objc-arc"] if ON_MAC else [])]


def sources(*patterns: str) -> list[str]:
    """Files under csrc/ that match, relative to the root as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "csrc").glob(pattern))


def extension() -> Extension:
    # csrc/metal needs Metal's headers: on Linux only what no launch is made in is built here, and the simulated device
    # builds the rest.
    without_metal = [f"metal/{name}.cpp" for name in ("launch", "prefill", "recorder", "shader_source")]
    everywhere = sources("bindings.cpp", "ops/*.cpp", *without_metal, "cpu/**/*.cpp")
    metal_half = [each for each in sources("metal/**/*.cpp", "metal/*.mm") if each not in everywhere]
    return CppExtension(
        "torch_gdn._C",
        everywhere + (metal_half if ON_MAC else []),
        depends=[*sources("**/*.h"), *map(str, (ROOT / "shaders").rglob("*.h"))],  # hosts include both
        include_dirs=[str(ROOT), str(ROOT / "csrc"), str(ROOT / "shaders")],
        extra_link_args=SANITIZE + (["-framework", "Metal", "-framework", "Foundation"] if ON_MAC else []),
    )


class BuildIncrementally(BuildExtension):
    """An editable install, a wheel and the packaging tests share one folder of objects: ninja rebuilds what changed."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / "objects")

    def build_extensions(self):
        # One run of setup.py may come here twice, and torch adds its flags to the extension's each time: other flags
        # than before would compile everything again.
        for extension in self.extensions:
            extension.extra_compile_args = {"cxx": COMPILE_FLAGS.copy()}
        super().build_extensions()


class BuildPythonAndShaders(build_py):
    """A wheel carries shaders/ as torch_gdn/shaders; a checkout or an editable install reads shaders/ itself."""

    def run(self):
        super().run()
        if not self.editable_mode:
            packaged = Path(self.build_lib) / "torch_gdn" / "shaders"
            shutil.rmtree(packaged, ignore_errors=True)  # a shader deleted since the last build must not be shipped
            shutil.copytree(ROOT / "shaders", packaged, ignore=shutil.ignore_patterns(".*"))


if sys.platform not in ("darwin", "linux"):
    sys.exit(f"torch_gdn builds on macOS (arm64) and on Linux; this is {sys.platform}")

setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildIncrementally, "build_py": BuildPythonAndShaders},
)
