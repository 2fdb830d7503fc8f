"""Runs examples/first_steps.ipynb, and compares what its cells compute with exact values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import notebooks
from tests.helpers.pages import FORKS

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/first_steps.ipynb"
pytestmark = pytest.mark.sweep(1, seeds=2)


def work(folder: Path) -> None:
    """Runs in a process of its own, because the notebook calls enable()."""
    result = notebooks.run(NOTEBOOK)
    names = result["names"]
    values = {name: names[name] for name in ("lengths", "plain", "coded", "losses")}
    values["hook"] = [list(x.shape) for x in names["seen"]]
    values["status"] = str(names["torch_gdn"].status())
    (folder / "results.json").write_text(json.dumps(values | {"notebook": result["notebook"]}))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers", "5.24")
    folder = tmp_path_factory.mktemp("notebook")
    process = FORKS.Process(target=work, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0
    values: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return values


def test_the_cells_show_what_they_promise(printed: dict[str, Any]) -> None:
    assert printed["hook"] == [[1, 100, 176]]  # 100 bytes of the prompt, and the hidden size
    assert printed["losses"][-1] < 0.6 * printed["losses"][0] and len(printed["losses"]) == 5
    assert printed["status"].startswith("3 of 3 Gated DeltaNet layers ran on torch_gdn")


def test_the_caches_have_the_bytes_of_their_formats(printed: dict[str, Any]) -> None:
    """A layer has one head of 128. A coded key or value has 64 bytes of codes, 2 of its norm, and a key 2 of its mean.

    The tail, the sinks and what fills no tile are exact: 256 tokens at these lengths.
    """
    assert printed["plain"] == [2 * 4 * 128 * n for n in printed["lengths"]]
    assert printed["coded"] == [2 * 4 * 128 * 256 + (2 * 66 + 2) * (n - 256) for n in printed["lengths"]]


def test_the_stored_outputs_have_the_same_kinds(printed: dict[str, Any]) -> None:
    """A reader on a code host sees the stored ones. Their digits may differ between processors."""
    stored = json.loads(NOTEBOOK.read_text())
    kinds = [
        [[each["output_type"] for each in cell.get("outputs", [])] for cell in notebook["cells"]]
        for notebook in (stored, printed["notebook"])
    ]
    assert kinds[0] == kinds[1]
    assert [cell["source"] for cell in stored["cells"]] == [cell["source"] for cell in printed["notebook"]["cells"]]
