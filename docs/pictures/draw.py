"""Draws the pictures of docs/: `python docs/pictures/draw.py` writes the SVG files next to this one.

A test compares the committed files with this output. The bars of fits.svg are the figures of `python -m torch_gdn fits
--table`.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
DARK, GREY, RED, BLUE = "#222", "#555", "#c33", "#1f5f9f"
OURS, MEMORY, DATA, OTHER, ATTENTION = "#cfe3f7", "#fff3bf", "#dff0d8", "#e8e8e8", "#f7dcc4"
ARROW = '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
LINE = 16  # pixels between two lines of text in a box


class Picture:
    """Collects the shapes of a picture, of `width` x `height` pixels with its heading in the corner."""

    def __init__(self, width: int, height: int, title: str, heading: str) -> None:
        self.shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<defs>{ARROW}<path d="M0 0L10 5L0 10z" fill="{GREY}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ]
        self.text(20, 26, heading, size=13, weight="bold")

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", fill: str = DARK, **more: str
    ) -> None:
        others = "".join(f' {name.replace("weight", "font-weight")}="{value}"' for name, value in more.items())
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
        self.shapes.append(f"<text {place}{others}>{escape(words)}</text>")

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str, size: int = 12) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {place} rx="5" fill="{fill}" stroke="{GREY}"/>')
        first = y + height / 2 + 4.5 - LINE / 2 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(x + width / 2, first + LINE * i, line, size=size, anchor="middle")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.shapes.append(f'<line {place} stroke="{GREY}" stroke-width="1.5" marker-end="url(#arrow)"/>')

    def svg(self) -> str:
        return "\n".join([*self.shapes, "</svg>", ""])


def hybrid() -> Picture:
    title = "A hybrid model: three Gated DeltaNet layers, then one attention layer, repeated"
    picture = Picture(860, 255, title, "One block, repeated through the model")
    picture.box(10, 148, 70, 40, DATA, "tokens", size=13)
    for i in range(4):
        is_attention, x = i == 3, 115 + 165 * i
        kept = ("keys and values", "of all tokens") if is_attention else ("state: K x V", "per value head")
        picture.box(x, 45, 130, 52, MEMORY, *kept)
        picture.arrow(x + 50, 97, x + 50, 132)
        picture.arrow(x + 80, 133, x + 80, 98)
        name, fill = ("full attention", ATTENTION) if is_attention else ("Gated DeltaNet", OURS)
        picture.box(x, 133, 130, 36, fill, name, size=13)
        picture.box(x, 175, 130, 28, OTHER, "MLP or experts", size=13)
        picture.arrow(x - 35, 168, x - 1, 168)
    picture.arrow(740, 168, 775, 168)
    picture.shapes.append(f'<path d="M115 212 H575" stroke="{BLUE}" stroke-width="2" fill="none"/>')
    picture.text(115, 228, "torch_gdn computes this. The size of a state is fixed.", fill=BLUE)
    picture.text(600, 222, "The cache grows with each token.")
    picture.text(600, 239, "AURA stores it in about 1/3.5 of float16.")
    return picture


def chunk() -> Picture:
    heading = "One threadgroup: one value head, 32 columns of the state"
    picture = Picture(850, 325, "A prompt, chunk by chunk, in one launch", heading)
    picture.arrow(4, 207, 29, 207)
    for i in range(3):
        x = 30 + 270 * i
        picture.box(x, 45, 215, 44, MEMORY, f"q, k, v, g, beta of chunk {i + 1}")
        picture.box(x, 112, 215, 48, OURS, "solve the triangular system:", "how tokens in the chunk interact")
        picture.box(x, 183, 215, 48, OURS, "matrix products with the state:", "outputs, and the new state")
        picture.box(x, 254, 215, 32, DATA, f"outputs of chunk {i + 1}")
        for y1, y2 in ((89, 112), (160, 183), (231, 254)):
            picture.arrow(x + 100, y1, x + 100, y2)
        picture.arrow(x + 215, 207, x + 269, 207)
        picture.text(x + 242, 199, "state", anchor="middle")
    words = (
        "The state stays in registers from the first chunk to the last. It is read from memory once, and written once."
    )
    picture.text(30, 312, words)
    return picture


def decode() -> Picture:
    title = "A decode step of a Gated DeltaNet layer: two launches between the projections"
    picture = Picture(770, 260, title, "One token, one Gated DeltaNet layer")
    for x, words in ((20, ("input", "projections")), (640, ("output", "projection"))):
        picture.box(x, 60, 110, 60, OTHER, *words, size=13)
        picture.text(x + 55, 140, "PyTorch", anchor="middle", fill=GREY)
    launches = (
        (170, 150, "launch 1", "short convolution", "last W - 1 inputs"),
        (370, 220, "launch 2", "gates, delta rule, gated norm", "state, in its slot of the pool"),
    )
    for x, width, name, what, kept in launches:
        picture.box(x, 50, width, 80, OURS, name, what, size=13)
        picture.box(x, 175, width, 44, MEMORY, kept, size=13)
        picture.arrow(x + width / 2 - 20, 174, x + width / 2 - 20, 131)
        picture.arrow(x + width / 2 + 20, 131, x + width / 2 + 20, 174)
    for x1, x2 in ((130, 169), (320, 369), (590, 639)):
        picture.arrow(x1, 90, x2, 90)
    picture.text(170, 245, "Each launch reads its memory once and writes it back to the same place.")
    return picture


def fits() -> Picture:
    from torch_gdn import command_line
    from torch_gdn.tools import fits

    title = "Memory that each model needs, by the format of its weights"
    picture = Picture(820, 482, title, "Memory in GB for one request of 32,768 tokens: weights, states and cache")
    left, pixels = 210, 3.294  # the x at which bars start, and pixels per GB
    picture.text(204, 47, "fits on a Mac of", size=11, anchor="end", fill=RED)
    for mac in (16, 32, 64, 96, 128):
        x = left + pixels * fits.recommended(mac) / 1e9
        picture.shapes.append(f'<path d="M{x:.1f} 52V448" stroke="{RED}" stroke-dasharray="4 4"/>')
        picture.text(round(x, 1), 47, str(mac), size=11, anchor="middle", fill=RED)
    y = 60
    for model in command_line.KNOWN_MODELS:
        needs = fits.needs_of(fits.configuration_of(model))
        for form, fill in (("bf16", "#7fa8d1"), ("FP8", "#94b7d7"), ("8 bits", "#a9c6e3"), ("4 bits", OURS)):
            needed = next(needs.total(name) for name in needs.weights if name.split(",")[0] == form)
            width = round(pixels * needed / 1e9, 1)
            picture.text(204, y + 13, f"{model}, {form}", anchor="end")
            bar = f'x="{left}" y="{y}" width="{width:g}" height="17" fill="{fill}" stroke="{GREY}"'
            label = f"{model}, {form}: {fits.gigabytes(needed)} GB"
            picture.shapes.append(f"<rect {bar}><title>{label}</title></rect>")
            outline = {"paint-order": "stroke", "stroke": "#fff", "stroke-width": "3"}
            picture.text(left + width + 5, y + 13, fits.gigabytes(needed), size=11, **outline)
            y += 22
        y += 10
    picture.text(20, 470, "python -m torch_gdn fits --table", size=11, fill=GREY)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {"hybrid": hybrid, "chunk": chunk, "decode": decode, "fits": fits}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
