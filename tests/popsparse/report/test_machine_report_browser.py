"""The page in a browser: its script draws without console errors. Needs Chromium."""

from __future__ import annotations

import html
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from popsparse.machine import (
    HALF,
    Copy,
    Engine,
    Execute,
    Graph,
    Repeat,
    Sequence,
    Target,
    codelets,
    rotation,
)
from popsparse.report import report_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1400,2400",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def browse(tmp_path, text: str, *flags: str) -> tuple[str, list[str]]:
    """Open a page; return its document afterwards and the console messages."""
    page = tmp_path / "page.html"
    page.write_text(text, "utf-8")
    profile = tmp_path / "browser"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


EMPTY = {"groups": 1, "grad_a_words_used": None, "grad_a_words_capacity": 0, "travels": []}


@pytest.fixture(scope="module")
def page() -> str:
    graph = Graph(Target.bow())
    tiles = np.arange(1472)
    x = graph.add_variable(HALF, [1472, 64], "x", tiles=tiles)
    y = graph.add_variable(HALF, [1472, 64], "y", tiles=tiles)
    fill = graph.add_compute_set("fill")
    graph.add_vertices(fill, codelets.FILL, tiles[:1000], {"out": x[:1000], "value": 1.0})
    turn = Sequence(Execute(fill), Copy(rotation(x, y, 1), name="rotate"), name="turns")
    profile = Engine(graph, Sequence(Repeat(30, turn), Copy(y, x, name="back"))).run()
    encoding = {
        **EMPTY,
        "partition": [4, 3, 2],
        "nz_used": list(range(24)),
        "nz_capacity": 20,
        "words_used": [5] * 24,
        "words_capacity": 9,
        "sub_groups": [1] * 24,
        "foreign": [0] * 24,
        "spilled": 3,
        "propagated": 2,
        "propagation_steps": 4,
        "demand": [10 * i for i in range(12)],
        "offsets": [[0, 1], [1, 2]],
    }
    return report_html(
        title="In a browser", summary={"cycles": 5}, profile=profile, encoding=encoding
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"paper": (255, 255, 255), "compute": (0, 114, 178), "exchange": (230, 159, 0)}),
        (
            ["--blink-settings=preferredColorScheme=0"],
            {"paper": (28, 33, 38), "compute": (61, 147, 208), "exchange": (230, 159, 0)},
        ),
    ],
    ids=["light", "dark"],
)
def test_page_is_drawn_without_console_messages(tmp_path, page, flags, expected):
    screenshot = tmp_path / "page.png"
    _, console = browse(tmp_path, page, f"--screenshot={screenshot}", *flags)
    assert console == []
    with Image.open(screenshot) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    # The script drew compute and exchange.
    assert set(expected.values()) <= {colour for _, colour in colours}
    assert max(colours)[1] == expected["paper"]


ACTS = """<script>
const at = (node, kind, x, y) => {
  const box = node.getBoundingClientRect();
  node.dispatchEvent(new PointerEvent(kind, {clientX: box.left + x, clientY: box.top + y}));
};
const tip = document.getElementById("tip"), said = [];
const canvas = document.querySelector("canvas"), shown = document.querySelector("output");
at(canvas, "pointermove", 80, 60);
said.push(tip.textContent.split("\\n")[0]);
document.querySelector("[data-do=in]").click();
said.push(shown.textContent);
document.querySelector("[data-do=all]").click();
said.push("[" + shown.textContent + "]");
const memory = document.getElementById("p0-memory");
at(memory, "pointermove", memory.getBoundingClientRect().width / 2, 40);
said.push(tip.textContent.split("\\n")[0].replace(/[0-9,]+/, "N"));
const map = document.getElementById("map-demand");
at(map, "pointermove", 40, 30);
said.push(tip.textContent.replace("\\n", ": "));
document.body.dataset.said = said.join(" | ");
</script></body>"""


def test_hover_and_zoom(tmp_path, page):
    text = page.replace("</body>", ACTS)
    document, console = browse(tmp_path, text, "--dump-dom")
    assert console == []
    found = re.search(r'data-said="([^"]*)"', document)
    assert found
    step, zoomed, whole, tile, cell = found.group(1).split(" | ")
    assert step == "turns/fill"
    assert re.fullmatch(r"cycles [\d,]+ to [\d,]+ of [\d,]+", zoomed)
    assert (whole, tile, cell) == ("[]", "tile N", "Y 0, X 0: 0 %")


CLICKS = """<script>
const all = (selector) => [...document.querySelectorAll(selector)];
const click = (node, x, y) => {
  const box = node.getBoundingClientRect();
  const [clientX, clientY] = [box.left + x * box.width, box.top + y * box.height];
  node.dispatchEvent(new MouseEvent("click", { clientX, clientY }));
};
const cells = (row) => row.innerText.split("\\t").slice(0, 4).join(" ");
const rows = (frame) => all(frame + " tbody tr").map(cells);
const heads = (frame) => all(frame + " h3").map((one) => one.textContent);
const told = [], tile = 1234;
const map = document.querySelector(".tile-contents svg"), view = map.viewBox.baseVal;
const [left, above, wide, high, columns] =
  ["left", "top", "width", "height", "columns"].map((name) => +map.dataset[name]);
const x = left + (tile % columns + 0.5) * wide;
const y = above + (Math.floor(tile / columns) + 0.5) * high;
click(map, x / view.width, y / view.height);
told.push(...heads(".what"), ...rows(".what"), all(".tile-contents input")[0].value);
click(all(".live svg .hit")[0], 0.99, 0.5);
told.push(heads(".held")[0]);
click(all(".live svg .hit")[0], 0.4, 0.5);
told.push(heads(".held")[0], ...rows(".held > .scroll"));
document.body.dataset.told = told.join(" | ");
</script></body>"""


def test_select_a_tile_and_a_step(tmp_path, page):
    document, console = browse(tmp_path, page.replace("</body>", CLICKS), "--dump-dom")
    assert console == []
    found = re.search(r'data-told="([^"]*)"', document)
    assert found
    tile, vertices, x, y, number, last, rotate, *rows = found.group(1).split(" | ")
    # x and y of 64 halves each; vertices are on the first 1,000 tiles.
    assert re.fullmatch(r"Tile 1,234: [\d,]+ of 638,976 B", tile)
    assert (vertices, number) == ("Vertices: 0", "1234")
    assert sorted([x, y]) == ["x always live float16 128", "y not always live float16 128"]
    assert last == "Step back: 1 variable beside those always live, 188,416 B"
    assert rotate.startswith("Step turns/rotate: 1 variable")
    assert rows == ["y float16 188,416 128"]


def test_narrow_page_does_not_scroll_horizontally(tmp_path):
    encoding = {
        **EMPTY,
        "partition": [4, 300, 1],
        "nz_used": [7] * 1200,
        "nz_capacity": 20,
        "words_used": [5] * 1200,
        "words_capacity": 9,
        "sub_groups": [1] * 1200,
        "foreign": [0] * 1200,
        "demand": [10] * 1200,
        "spilled": 0,
        "propagated": 0,
        "propagation_steps": 0,
        "offsets": [],
    }
    page = html.escape(report_html(title="Wide maps", summary={"cycles": 5}, encoding=encoding))
    frame = f'<iframe srcdoc="{page}" style="width: 420px; height: 900px"></iframe>'
    measure = """<script>const frame = document.querySelector("iframe"); frame.onload = () => {
      const root = frame.contentDocument.documentElement;
      document.body.dataset.widths = root.scrollWidth + " " + root.clientWidth;
    };</script>"""
    document, _ = browse(tmp_path, f"<body>{frame}{measure}</body>", "--dump-dom")
    found = re.search(r'data-widths="(\d+) (\d+)"', document)
    assert found
    needed, there = map(int, found.groups())
    assert needed == there <= 420
