"""Opens pages of a folder in headless Chromium, without a network, and asks them for their faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import unquote

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 300  # seconds, for all pages
LEAST_CONTRAST = 4.5  # of text with what is behind it (WCAG 2.2, level AA)

# Runs before a page's own scripts: keeps what fails to load, what a script raises and what it writes as an error.
FIRST = """<script>
window.faults = [];
addEventListener("error", (e) => faults.push(e.message || "not loaded: " + (e.target.src || e.target.href)), true);
console.error = (...words) => faults.push(words.join(" "));
</script>"""

# Loads one page after the other into a frame of each width, and sends their faults.
DRIVER = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS;
const frame = document.createElement("iframe");
document.body.append(frame);

function text_outside(picture) {
  const found = [], boxes = [...picture.querySelectorAll("rect[rx]")].map((rect) => rect.getBBox());
  const all = picture.viewBox.baseVal;
  for (const text of picture.querySelectorAll("text")) {
    const b = text.getBBox(), x = b.x + b.width / 2, y = b.y + b.height / 2;
    const box = boxes.find((r) => x > r.x && x < r.x + r.width && y > r.y && y < r.y + r.height) || all;
    const is_outside = b.x < box.x + 1 || b.x + b.width > box.x + box.width - 1;
    if (is_outside) found.push("text leaves its box: " + text.textContent);
  }
  return found;
}

// Red, green, blue and opacity of a colour as getComputedStyle gives it.
const parts_of = (colour) => [...colour.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);

// The colour behind an element: backgrounds up to the page's, the nearer ones over the others.
function background_of(element, inside) {
  if (!element) return [255, 255, 255];
  const [r, g, b, opacity] = parts_of(inside.getComputedStyle(element).backgroundColor);
  if (opacity === 1) return [r, g, b];
  const behind = background_of(element.parentElement, inside);
  return [r, g, b].map((x, i) => opacity * x + (1 - opacity) * behind[i]);
}

// The contrast of two colours by WCAG 2.2, from 1 to 21.
function contrast(...colours) {
  const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const [dark, bright] = colours.map(light).sort((x, y) => x - y);
  return (bright + 0.05) / (dark + 0.05);
}

// Text that is hard to read in the theme for light or for dark.
function faint_text(inside) {
  const found = [], all = [...inside.document.querySelectorAll("article *")];
  const has_text = (x) => [...x.childNodes].some((y) => y.nodeType === 3 && y.data.trim());
  const texts = all.filter((x) => has_text(x) && x.getClientRects().length);
  for (const theme of ["light", "dark"]) {
    inside.document.body.dataset.theme = theme;
    for (const text of texts) {
      const ratio = contrast(parts_of(inside.getComputedStyle(text).color), background_of(text, inside));
      const where = `${theme}: ${text.textContent.slice(0, 60)}`;
      if (ratio < LEAST_CONTRAST) found.push(`contrast ${ratio.toFixed(1)}, ${where}`);
    }
  }
  return found;
}

function faults_of(page, inside, width) {
  const found = [...inside.faults || []];
  const root = inside.document.documentElement;
  if (root.localName === "svg") return found.concat(text_outside(root));
  for (const image of inside.document.images) if (!image.naturalWidth) found.push("broken image: " + image.src);
  const wide = root.scrollWidth - root.clientWidth;
  if (wide > 0) found.push(`the page is ${wide} pixels wider than ${width}`);
  for (const link of inside.document.querySelectorAll("a[href^='#']")) {
    const name = decodeURIComponent(link.getAttribute("href").slice(1));
    if (name && !inside.document.getElementById(name)) found.push("missing anchor: #" + name);
  }
  for (const box of inside.document.querySelectorAll("article p, article li, article h1, article h2, .card")) {
    if (box.scrollWidth > box.clientWidth + 1 && inside.getComputedStyle(box).display !== "inline")
      found.push("text leaves its box: " + box.textContent.slice(0, 60));
  }
  return found.concat(faint_text(inside));
}

(async () => {
  const found = {};
  for (const width of widths) {
    frame.width = width;
    frame.height = 900;
    for (const page of pages) {
      await new Promise((done) => { frame.onload = done; frame.src = "/" + page; });
      await new Promise((done) => setTimeout(done, 50));
      let faults;
      try {
        faults = faults_of(page, frame.contentWindow, width);
      } catch (error) {
        faults = ["cannot be read: " + error];
      }
      if (faults.length) found[`${page} at ${width}`] = [...new Set(faults)];
    }
  }
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
})();
</script>"""


def program() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def faults(folder: Path, pages: Sequence[str], widths: Sequence[int]) -> dict[str, list[str]]:
    """Returns the faults of each page at each width, of those that have any.

    Raises:
        queue.Empty: If the browser does not answer.
    """
    answers: Queue[dict[str, list[str]]] = Queue()
    driver = DRIVER.replace("PAGES", json.dumps(list(pages))).replace("WIDTHS", json.dumps(list(widths)))
    driver = driver.replace("LEAST_CONTRAST", str(LEAST_CONTRAST))

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def do_GET(self) -> None:
            path = folder / unquote(self.path.partition("?")[0]).lstrip("/")
            if self.path != "/driver" and not (path.suffix == ".html" and path.is_file()):
                super().do_GET()
                return
            text = driver if self.path == "/driver" else path.read_text().replace("<head>", f"<head>{FIRST}", 1)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [
        str(program()),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ]
    command += [
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"http://127.0.0.1:{server.server_port}/driver",
    ]
    browser = subprocess.Popen(
        [*command[:-1], "--remote-debugging-port=0", command[-1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return answers.get(timeout=TIMEOUT)
    finally:
        browser.terminate()
        browser.wait()
        server.shutdown()
