"""Draws the figures of the studies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels_at(path: Path, count: int, **options: Any) -> Iterator[Any]:
    """Yields the axes of panels side by side, and writes them as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, count, layout="constrained", **options)
    yield panels
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
