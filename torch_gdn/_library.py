"""Loads the extension, which defines torch.ops.gdn.*, and tells it where its shaders are. Registers fake kernels."""

from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

try:
    import torch  # before the extension, which needs its libraries
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "torch_gdn: PyTorch is not installed in this environment. Install the version that torch_gdn was built with, "
        "such as: pip install torch==2.13.0",
        name="torch",
    ) from None

PACKAGE = Path(__file__).resolve().parent
BUILD = "pip install -e . --no-build-isolation"  # without -e, Python finds a checkout's sources, and no build
REBUILD = f"build torch_gdn for this PyTorch, in a checkout: {BUILD}"


def why_not_loaded() -> str:
    if any((PACKAGE / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return f"torch_gdn: the extension does not load with torch {torch.__version__}; {REBUILD}"
    return (
        f"torch_gdn: {PACKAGE} has no extension for this Python, only the sources. Build it in {PACKAGE.parent}: "
        f"{BUILD}. To use a torch_gdn that is installed elsewhere, start Python in another folder"
    )


try:
    from torch_gdn import _C
except ImportError as error:
    raise ImportError(why_not_loaded()) from error


def check_torch(built_with: str, loaded: str) -> None:
    """Raises ImportError if the minor versions differ: the layout of C++ classes that the extension shares may differ
    too.
    """
    if built_with.split(".")[:2] != loaded.split(".")[:2]:
        raise ImportError(f"torch_gdn: expected torch {built_with}, which it was built with, got {loaded}; {REBUILD}")


def shader_directory() -> Path:
    """Returns torch_gdn/shaders in an installed wheel, else shaders/ of the checkout."""
    packaged = PACKAGE / "shaders"
    return packaged if packaged.is_dir() else PACKAGE.parent / "shaders"


check_torch(_C.built_with_torch, torch.__version__)
_C.set_shader_directory(str(shader_directory()))
for _op in _C.ops():
    torch.library.register_fake(f"gdn::{_op}", partial(_C.infer_outputs, _op))
