"""Runs the cells of a notebook in one namespace, and keeps what they print and draw.

`python -m tests.helpers.notebooks examples/first_steps.ipynb` writes the outputs into the notebook.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(path: Path) -> dict[str, Any]:
    """Executes the code cells in order, and leaves their names in the result: "text" of each cell, and its "names"."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    notebook, names = json.loads(path.read_text()), {"__name__": "__main__"}
    for number, cell in enumerate(each for each in notebook["cells"] if each["cell_type"] == "code"):
        printed = io.StringIO()
        code = compile("".join(cell["source"]), f"{path.name}, cell {number + 1}", "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        cell["execution_count"] = number + 1
        cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": {"image/png": png(figure)}}
                           for figure in map(pyplot.figure, pyplot.get_fignums())]  # fmt: skip
        pyplot.close("all")
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": text})
    return {"notebook": notebook, "names": names}


def png(figure: Any) -> str:
    file = io.BytesIO()
    figure.set_size_inches(5, 3)
    figure.savefig(file, format="png", dpi=70, bbox_inches="tight", metadata={"Software": None})
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(json.dumps(run(target)["notebook"], indent=1, ensure_ascii=False) + "\n")
