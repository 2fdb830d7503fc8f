"""The text that the model learns, the source of Python's standard library, and the measure of how well it learned."""

import math
import sysconfig
from pathlib import Path

import torch

# These modules judge the model, which is not trained on them. Every Python from 3.10 on has them.
HELD_BACK = (
    "argparse.py",
    "asyncio/queues.py",
    "csv.py",
    "dataclasses.py",
    "heapq.py",
    "http/cookies.py",
    "json/decoder.py",
    "queue.py",
    "shelve.py",
    "statistics.py",
    "textwrap.py",
    "zipfile.py",
    "zipfile/__init__.py",  # zipfile.py became this in Python 3.12
)
# These are tables and prose, not code; installed packages; and test data that is no Python, or does not parse.
LEFT_OUT = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "cjkencodings", "tokenizedata"}
END_OF_FILE = b"\0"  # never occurs in Python source


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def held_back_files(library: Path) -> list[Path]:
    return [library / name for name in HELD_BACK if (library / name).is_file()]


def tells_of_held_back(path: Path) -> bool:
    """Returns whether a file is the test of a module that is held back."""
    subjects = {Path(name).parent.name if Path(name).stem == "__init__" else Path(name).stem for name in HELD_BACK}
    return any(f"test_{subject}" in (path.stem, path.parent.name) for subject in subjects)


def training_files(library: Path) -> list[Path]:
    """Returns the source of every other module, in the order of their names."""
    held_back = set(held_back_files(library))
    return [
        path
        for path in sorted(library.rglob("*.py"))
        if path not in held_back
        and not tells_of_held_back(path)
        and not LEFT_OUT & set(path.relative_to(library).parts)
    ]


def joined(files: list[Path]) -> bytes:
    """Joins the files' bytes, each after an END_OF_FILE, so that one byte of context says that a file begins."""
    return b"".join(END_OF_FILE + path.read_bytes() for path in files)


def pieces(data: torch.Tensor, length: int) -> torch.Tensor:
    """Returns [count, length + 1]: all of a text in pieces of `length` bytes to predict, each after one given byte."""
    return data[: (len(data) - 1) // length * length + 1].unfold(0, length + 1, length)


def as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def cross_entropy(model: torch.nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    """Returns the mean over the pieces' bytes but the first, in nats per byte."""
    tokens = pieces.long()
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, pieces: torch.Tensor, batch: int) -> float:
    """Returns the bits per byte for a model that knows the piece's earlier bytes. It takes `batch` pieces at a time."""
    losses = [float(cross_entropy(model, some)) * len(some) for some in pieces.split(batch)]
    return sum(losses) / len(pieces) / math.log(2)
