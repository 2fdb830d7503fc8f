"""Measures what formats of keys and values do to two trained models at equal bytes, for docs/lab/cache-formats.md.

    python -m evidence.lab.studies.kv_quality              measures what kv_quality.json lacks, then writes both
    python -m evidence.lab.studies.kv_quality --only 4v4   measures formats whose names contain this

The formats are those of evidence.lab.studies.kv_formats, the models those of evidence.lab.studies.kv_models, with 2,048
and 8,192 tokens, of which the last 1,024 are judged. Bits count scales, norms, means, and what stays in float16. Each
figure is written as soon as it is there, so you can stop a run and go on later. To measure a format again, delete its
entries.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from evidence.lab.studies.figures import panels_at
from evidence.lab.studies.kv_formats import Format, all_formats
from evidence.lab.studies.kv_models import Pycode, SmolLM2, python_reference, vim_manual

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).with_suffix(".json")
PAGE, PLOT = ROOT / "docs/lab/cache-formats.md", ROOT / "docs/aura_kl.png"
BEGIN, END = "<!-- evidence.lab.studies.kv_quality begins -->", "<!-- evidence.lab.studies.kv_quality ends -->"
KL = {4.5: 0.0015, 3.5: 0.005, 2.5: 0.025}  # by bits to a tenth, the largest that is good enough
ERRORS = {4.4: 0.033, 3.4: 0.065, 2.4: 0.13}
NEEDED = (("SmolLM2, 8k", "kl", KL), ("SmolLM2, 8k of Vim's manual", "kl", KL), ("pycode, 8k", "error", ERRORS))
RANGE = (2.5, 6.5)  # bits between which no other format may have a smaller KL
Results = dict[str, dict[str, dict[str, float]]]  # by case, then by format


class Case(NamedTuple):
    """A model with a prompt."""

    tokens: int
    D: int
    make: Callable[[], SmolLM2 | Pycode]


CASES = {
    "SmolLM2, 8k": Case(8192, SmolLM2.D, lambda: SmolLM2(8192, python_reference())),
    "SmolLM2, 2k": Case(2048, SmolLM2.D, lambda: SmolLM2(2048, python_reference())),
    "pycode, 8k": Case(8192, Pycode.D, lambda: Pycode(8192, 2)),
    "pycode, 2k": Case(2048, Pycode.D, lambda: Pycode(2048, 4)),
    "SmolLM2, 8k of Vim's manual": Case(8192, SmolLM2.D, lambda: SmolLM2(8192, vim_manual())),
}


def measure(formats: dict[str, Format], cases: dict[str, Case]) -> None:
    """Fills in what is missing, one format at a time."""
    models: dict[str, SmolLM2 | Pycode] = {}
    results = read()
    missing = [(form, key) for form in formats.values() for key in cases if form.name not in results.get(key, {})]
    progress = tqdm(missing, unit="figure")
    for form, key in progress:
        progress.set_description(f"{form.name}: {key}")
        if key not in models:
            models[key] = cases[key].make()
        result = {"bits": form.bits(cases[key].tokens, cases[key].D), **models[key].judge(form)._asdict()}
        write(key, form.name, {name: float(f"{x:.5g}") for name, x in result.items()})


def read() -> Results:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(key: str, name: str, found: dict[str, float]) -> None:
    """Keeps what another run may have written since."""
    results = read()
    results.setdefault(key, {})[name] = found
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(RESULTS)  # so that another run never reads half of it


def table(results: Results, formats: dict[str, Format]) -> str:
    """Tabulates the formats by their bits at 8,192 tokens."""
    columns = {
        "bits at 2k": ("SmolLM2, 2k", "bits", ".2f"),
        "bits at 8k": ("SmolLM2, 8k", "bits", ".2f"),
        "KL at 2k": ("SmolLM2, 2k", "kl", ".2g"),
        "KL at 8k": ("SmolLM2, 8k", "kl", ".2g"),
        "same token at 8k": ("SmolLM2, 8k", "same", ".1%"),
        "KL at 8k, Vim's manual": ("SmolLM2, 8k of Vim's manual", "kl", ".2g"),
        "pycode: bits at 8k": ("pycode, 8k", "bits", ".2f"),
        "error at 2k": ("pycode, 2k", "error", ".3g"),
        "error at 8k": ("pycode, 8k", "error", ".3g"),
        "bits a byte at 8k": ("pycode, 8k", "bits_per_byte", ".4f"),
    }
    rows = ["| format | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    bits = {name: x["bits"] for key in reversed(CASES) for name, x in results.get(key, {}).items() if name in formats}
    for name in sorted(bits, key=lambda name: -bits[name]):
        cells = [name]
        for key, what, spec in columns.values():
            result = results.get(key, {}).get(name)
            cells.append(f"{result[what]:{spec}}".replace("%", " %") if result else "")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def is_ours(name: str) -> bool:
    return name.startswith("AURA")


def judge(results: Results) -> list[str]:
    """Returns a line for each requirement: what was measured for it, and whether it is met."""
    verdicts = []
    for key, what, limits in NEEDED:
        result = {name: (x["bits"], x[what]) for name, x in results.get(key, {}).items()}
        for bits, most in limits.items():
            fitting = [
                (loss, at, name) for name, (at, loss) in result.items() if is_ours(name) and round(at, 1) <= bits
            ]
            loss, at, name = min(fitting, default=(float("inf"), 0.0, "none"))
            verdict = "met" if loss <= most else "not met"
            verdicts.append(
                f"{key}: {what} at most {most} at {bits} bits: {verdict}, {loss:.3g} with {name} at {at:.2f}"
            )
        for name, (bits, loss) in result.items():
            if what == "kl" and RANGE[0] <= bits <= RANGE[1] and not is_ours(name):
                rivals = [(lost, at, other) for other, (at, lost) in result.items() if is_ours(other) and at <= bits]
                least, at, other = min(rivals, default=(float("inf"), 0.0, "none"))
                verdict = "met" if least <= loss else "not met"
                verdicts.append(
                    f"{key}: {name}, {bits:.2f} bits, {loss:.3g}: {verdict}, {least:.3g} with {other} at {at:.2f}"
                )
    return verdicts


def plot(results: Results, formats: dict[str, Format], path: Path) -> None:
    """Plots KL over bits at both lengths, with a line for each family."""
    from matplotlib import colormaps

    with panels_at(path, 2, figsize=(13, 6), sharey=True) as panels:
        families = dict.fromkeys(form.family for form in formats.values())
        colors = colormaps["tab20"]
        for axes, key in zip(panels, ("SmolLM2, 2k", "SmolLM2, 8k"), strict=True):
            result = {name: x for name, x in results.get(key, {}).items() if name in formats}
            for i, family in enumerate(families):
                points = sorted(
                    (x["bits"], x["kl"], name) for name, x in result.items() if formats[name].family == family
                )
                if points:
                    bits, kl, names = zip(*points, strict=True)
                    style = "o-" if family.startswith("AURA") else "s:"
                    axes.plot(bits, kl, style, color=colors(i), label=family, markersize=4, linewidth=0.8)
                    for at, loss, name in zip(bits, kl, names, strict=True):
                        text = name.removeprefix("AURA ").split(",")[0]
                        axes.annotate(
                            text, (at, loss), xytext=(3, 3), textcoords="offset points", fontsize=6, color=colors(i)
                        )
            axes.set(title=key, xlabel="bits a value, with everything", yscale="log")
        panels[0].set_ylabel("KL of the next token, nats")
        panels[1].legend(fontsize=7)


def write_page(text: str) -> None:
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        raise ValueError(f"{PAGE}: expected the lines {BEGIN!r} and {END!r}, between which the table goes")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="KL and errors of cache formats at equal bytes, as a table and a plot")
    parser.add_argument("--only", default="", help="measure formats whose names contain this (default: all)")
    parser.add_argument(
        "--case", default="", help=f"in cases whose names contain this (default: all, {', '.join(CASES)})"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads to compute with (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report(arguments.only, arguments.case)


def report(only: str = "", case: str = "") -> None:
    """Measures what is missing, writes the table and the plot, and prints the table and the verdicts."""
    formats = all_formats()
    wanted = {name: form for name, form in formats.items() if only in name}
    measure(wanted, {key: result for key, result in CASES.items() if case in key})
    results = read()
    write_page(table(results, formats))
    plot(results, formats, PLOT)
    print(table(results, formats), "", *judge(results), sep="\n")
    print(f"\nThe plot: {PLOT}")


if __name__ == "__main__":
    main()
