"""Tests the pages that `make docs` builds: warnings, raw markup, links, pictures, and their looks in a browser."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.helpers import browser
from tests.tools.test_docs import DOCS, PAGES, need, run

pytestmark = [pytest.mark.sweep(1, seeds=2), pytest.mark.xdist_group("site")]
FROM_ELSEWHERE = "https://cdn.jsdelivr.net/npm/mathjax@"  # the one file that a page loads from another host
PHONE, SCREEN = 400, 1400  # pixels


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    need("sphinx", "myst_parser", "furo", "transformers", "safetensors")
    folder = tmp_path_factory.mktemp("site")
    arguments = ["--quiet", "--fail-on-warning", "--keep-going", "-d", f"{folder}/trees", str(DOCS), f"{folder}/html"]
    return folder / "html", run("-m", "sphinx", *arguments)


@pytest.fixture(scope="module")
def site(built: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    return built[0]


def test_builds_without_a_warning_or_raw_markup(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, finished = built
    assert finished.returncode == 0, finished.stdout + finished.stderr
    pages = {page.stem: page.read_text() for page in folder.rglob("*.html")}
    assert {page.stem for page in PAGES} <= set(pages)
    # These are boxes (:::), definitions (a line that a colon starts) and formulas, whose MyST extensions are off. No
    # warning reports them.
    raw = {name: re.findall(r"^.*:::.*$|^: .*$|^\$\$$", html, flags=re.MULTILINE) for name, html in pages.items()}
    assert {name: lines for name, lines in raw.items() if lines} == {}


class Links(HTMLParser):
    """Collects a page's anchors, and what it links to and shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


def test_links_and_pictures_exist(site: Path) -> None:
    pages = {page: Links(page.read_text()) for page in site.rglob("*.html")}
    assert sum(len(links.targets) for links in pages.values()) > 1000
    assert list(missing(site, pages)) == []


def missing(site: Path, pages: dict[Path, Links]) -> Iterator[str]:
    for page, links in pages.items():
        for target in links.targets:
            where = f"{page.relative_to(site)}: {target}"
            if target.startswith(("http:", "https:", "mailto:", "data:")):
                if target.endswith((".js", ".css")) and not target.startswith(FROM_ELSEWHERE):
                    yield where
                continue
            path, _, anchor = unquote(target).partition("#")
            file = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not file.is_file() or (anchor and file in pages and anchor not in pages[file].anchors):
                yield where


def test_missing_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    good = '<p id="a"><a href="#a"><img src="x.png"><a href="page.html#a"><a href="https://example.org">'
    page.write_text(good)
    (tmp_path / "x.png").touch()
    assert list(missing(tmp_path, {page: Links(good)})) == []
    bad = '<a href="#b"><img src="y.png"><script src="https://example.org/z.js">'
    result = sorted(missing(tmp_path, {page: Links(bad)}))
    assert result == ["page.html: #b", "page.html: https://example.org/z.js", "page.html: y.png"]


def need_a_browser() -> None:
    if browser.program() is None:
        pytest.skip(f"none of {', '.join(browser.PROGRAMS)} is installed")


def test_pages_look_right_in_a_browser(site: Path) -> None:
    """On a phone and on a screen, light and dark: no error, broken picture or missing anchor; all can be read."""
    need_a_browser()
    pages = [str(page.relative_to(site)) for page in sorted(site.rglob("*.html")) if page.name != "search.html"]
    assert len(pages) > 30
    result = browser.faults(site, pages, (PHONE, SCREEN))
    ours = {page: [fault for fault in faults if FROM_ELSEWHERE not in fault] for page, faults in result.items()}
    assert {page: faults for page, faults in ours.items() if faults} == {}


def test_text_of_pictures_stays_in_its_boxes() -> None:
    need_a_browser()
    pictures = [f"pictures/{path.name}" for path in sorted((DOCS / "pictures").glob("*.svg"))]
    assert len(pictures) >= 4
    assert browser.faults(DOCS, pictures, (SCREEN,)) == {}


BAD = {
    "console error": '<p>x<script>console.error("wrong")</script>',
    "a script's error": "<script>undefined_name</script>",
    "broken image": '<img src="missing.png">',
    "missing anchor": '<a href="#missing">x</a>',
    "wide page": '<div style="width: 2000px">x</div>',
    "faint text": '<article><p style="color: #999; background: #fff">grey on white</p></article>',
    "faint text in the dark": "<style>[data-theme=dark] p { color: #333; background: #000 }</style>"
    "<article><p>x</p></article>",
    "text in a card": '<article><p style="width: 20px; white-space: nowrap">text that is wider</p></article>',
}
BOX = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 50"><rect rx="5" x="20" y="5" width="60" height="40"/>'


def test_each_fault_is_found_in_a_browser(tmp_path: Path) -> None:
    need_a_browser()
    for name, body in BAD.items():
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><html><head></head><body>{body}</body></html>")
    (tmp_path / "good.html").write_text(
        "<!doctype html><html><head></head><body><p id=a><a href='#a'>x</a></body></html>"
    )
    (tmp_path / "bad.svg").write_text(f'{BOX}<text x="50" y="28" text-anchor="middle">far wider than it</text></svg>')
    (tmp_path / "good.svg").write_text(f'{BOX}<text x="50" y="28" text-anchor="middle">x</text></svg>')
    pages = [path.name for path in tmp_path.iterdir()]
    result = browser.faults(tmp_path, pages, (SCREEN,))
    assert result.keys() == {f"{name}.html at {SCREEN}" for name in BAD} | {f"bad.svg at {SCREEN}"}
