"""Loads the extension, which defines torch.ops.gdn.*, and tells it where its shaders are. Registers fake kernels."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
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

from torch_gdn._version import __version__

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


def check_folder(package: Path, extension: Path) -> None:
    """Raises ImportError if the extension is not in the package's folder: it is another copy's, whose editable install
    Python also searches.
    """
    if not package.samefile(extension):
        raise ImportError(
            f"torch_gdn: expected the extension in {package}, like the sources, got another copy's, in {extension}. "
            f"Build this copy in {package.parent}: {BUILD}. To use the other copy, start Python in another folder"
        )


def check_version(package: Path, built: str, sources: str) -> None:
    """Raises ImportError if the extension was built from sources of another version."""
    if built != sources:
        raise ImportError(
            f"torch_gdn: expected an extension of version {sources}, as the sources in {package}, got one of {built}. "
            f"Build it again in {package.parent}: {BUILD}"
        )


# Before it is loaded, because nothing can take its ops back. The paths are as Python found them: in a tree of links,
# the extension is no link.
_found = find_spec("torch_gdn._C")
if _found is not None and _found.origin is not None:
    check_folder(Path(__file__).parent, Path(_found.origin).parent)
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
check_version(PACKAGE, getattr(_C, "version", "an older version"), __version__)
_C.set_shader_directory(str(shader_directory()))
for _op in _C.ops():
    torch.library.register_fake(f"gdn::{_op}", getattr(torch.ops.gdn_infer, _op).default)
