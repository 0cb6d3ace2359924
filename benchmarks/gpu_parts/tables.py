"""The tables of docs/gpu.md: what the formula says, and what a run of gpu.py has measured.

python benchmarks/gpu_parts/tables.py                  # writes the formula's tables anew
python benchmarks/gpu_parts/tables.py results.json     # prints those of a run
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from dynsparse.ops.linear.costs import Layer  # noqa: E402
from dynsparse.ops.linear.cuda.chip import INTERPRETED, Chip  # noqa: E402
from dynsparse.ops.linear.cuda.configurations import BLOCKS  # noqa: E402
from dynsparse.ops.linear.cuda.costs import (  # noqa: E402
    PASSES,
    bounds,
    choose,
    product,
    seconds,
)
from dynsparse.ops.linear.cuda.rates import RATES, Rates  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
H200 = RATES["90"]
CHIPS = {"80": (8, 0), "86": (8, 9), "90": (9, 0), "100": (10, 0)}


def layer(n: int, density: float, b: int) -> Layer:
    return Layer(n, n, max(1, round(density * (n // b) ** 2)), b)


def step(at: Layer, batch: int, chip: Chip, rates: Rates, captured: bool) -> tuple[float, str]:
    """How many times faster than masked dense a whole step is expected to be, and by which kinds.

    "blocks" where both directions are computed by them, "dense" likewise, "both" else.
    """
    ours, kinds = 0.0, set()
    for backward, passes in ((False, PASSES[:1]), (True, PASSES[1:])):
        kind = choose(at, batch, backward, torch.bfloat16, chip)
        kinds.add(kind)
        for what in passes:
            ours += seconds(kind, at, batch, what, "16-bit", rates, captured=captured)
    masked = sum(
        seconds("masked", at, batch, what, "16-bit", rates, captured=captured) for what in PASSES
    )
    return masked / ours, kinds.pop() if len(kinds) == 1 else "both"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _us(time: float) -> str:
    return f"{time * 1e6:.0f}"


def _bounds() -> str:
    rows = []
    for b in (1, 4, 8, 16, 32, 64, 128):
        at = layer(4096, 0.1, b)
        forward, weight = (bounds(at, 8192, p, "16-bit", H200) for p in PASSES[::2])
        dense = product(at, 8192, "16-bit", H200)
        ratio, kind = step(at, 8192, INTERPRETED, H200, captured=False)
        expected = seconds("blocks", at, 8192, "forward", "16-bit", H200)
        rows.append([
            b, *map(_us, forward), _us(weight.cache), f"{dense / forward.least:.1f}x",
            f"{dense / weight.least:.1f}x", _us(expected) if b in BLOCKS else "",
            kind, f"{ratio:.2f}x",
        ])  # fmt: skip
    head = ["block", "arithmetic", "operands", "memory", "L2, forward", "L2, grad_weight",
            "forward at most", "grad_weight at most", "expected forward", "computed by",
            "expected step"]  # fmt: skip
    return markdown(head, rows)


def _sizes() -> str:
    rows = []
    for n, batch, density in [
        (4096, 8192, 0.05), (4096, 8192, 0.2), (4096, 8192, 0.5), (4096, 1024, 0.1),
        (2048, 8192, 0.1), (1024, 8192, 0.1), (8192, 8192, 0.1),
    ]:  # fmt: skip
        found = [
            step(layer(n, density, b), batch, INTERPRETED, H200, captured=False)
            for b in (16, 32, 64, 128)
        ]
        cells = [f"{ratio:.2f}x" + (" (dense)" if kind == "dense" else "") for ratio, kind in found]
        rows.append([n, batch, density, *cells])
    return markdown(["features", "samples", "density", *(f"blocks {b}" for b in BLOCKS)], rows)


def _losses() -> str:
    rows = []
    for n in (1024, 2048, 4096, 8192):
        for batch in (512, 2048, 8192):
            cells = [
                f"{step(layer(n, d, b), batch, INTERPRETED, H200, captured)[0]:.2f}x"
                for d, b in ((0.1, 1), (0.5, 1), (0.1, 64))
                for captured in (False, True)
            ]
            rows.append([n, batch, *cells])
    what = ("elements, 0.1", "elements, 0.5", "blocks 64, 0.1")
    head = [f"{name}, {way}" for name in what for way in ("launched", "captured")]
    return markdown(["features", "samples", *head], rows)


def _chips() -> str:
    rows = []
    for family, capability in CHIPS.items():
        rates = RATES[family]  # type: ignore[index]
        chip = Chip(capability, rates.multiprocessors, 40 << 20)
        found = [
            step(layer(4096, 0.1, b), 8192, chip, rates, captured=False)[0]
            for b in (1, 16, 32, 64, 128)
        ]
        state = "measured" if rates.measured else "predicted"
        rows.append([rates.name, ".".join(map(str, capability)), f"{rates.cache / 1e12:.1f}",
                     f"{rates.products['16-bit'] / 1e12:.0f}", *(f"{r:.2f}x" for r in found),
                     state])  # fmt: skip
    head = ["chip", "capability", "L2, TB/s", "dense 16-bit, TFLOP/s", "elements",
            *(f"blocks {b}" for b in BLOCKS), "shares"]  # fmt: skip
    return markdown(head, rows)


def _float32() -> str:
    rows = []
    for b in (16, 32, 64, 128):
        cells: list[object] = [b]
        for numbers in ("tf32", "tf32x3"):
            at = layer(4096, 0.1, b)
            dense = product(at, 8192, numbers, H200)
            forward = bounds(at, 8192, "forward", numbers, H200).least
            taken = seconds("blocks", at, 8192, "forward", numbers, H200)
            cells += [_us(dense), f"{dense / forward:.1f}x", f"{dense / taken:.1f}x"]
        rows.append(cells)
    head = ["block", "dense, TF32", "at most", "expected", "dense, no TF32", "at most", "expected"]
    return markdown(head, rows)


def _beside() -> str:
    rows = []
    for n, batch in ((1024, 8192), (4096, 512), (4096, 2048), (4096, 8192), (8192, 8192)):
        cells: list[object] = [n, batch]
        for b in (32, 64, 128):
            at = layer(n, 0.1, b)
            whole = sum(
                seconds("blocks", at, batch, p, "16-bit", H200, captured=True) for p in PASSES
            )
            for moved in (6 * at.nnz * b * b, 2 * batch * n):
                cells.append(f"{100 * (moved / H200.memory + 2e-6) / whole:.1f} %")
        rows.append(cells)
    head = [f"{b}, {what}" for b in (32, 64, 128) for what in ("rounding", "bias")]
    return markdown(["features", "samples", *head], rows)


TABLES = {
    "bounds": _bounds, "beside": _beside, "sizes": _sizes, "losses": _losses, "chips": _chips,
    "float32": _float32,
}  # fmt: skip


def tables() -> dict[str, str]:
    return {name: make() for name, make in TABLES.items()}


def measured(results: dict[str, Any]) -> str:
    """Of a run: what was measured, beside bounds and what was expected, section by section."""
    parts = [f"Measured on: {json.dumps(results['about'])}"]
    for section in results["sections"]:
        rows = [r for r in results["rows"] if section in (r["section"], _whole(r))]
        if rows:
            cells = [
                [r["what"], r.get("us", ""), r.get("bound_us", ""), _percent(r.get("share")),
                 r.get("dense_us", ""), _times(r.get("ratio")), r.get("expected", ""),
                 _times(r.get("wanted")), _also(r)]
                for r in rows
            ]  # fmt: skip
            head = ["what", "us", "bound", "share", "dense", "ratio", "expected", "wanted", "also"]
            parts += [f"### {section}", markdown(head, cells)]
    return "\n\n".join(parts)


_COLUMNS = {
    "section", "what", "us", "bound_us", "share", "dense_us", "ratio", "expected", "wanted",
}  # fmt: skip


def _whole(row: dict[str, Any]) -> str:
    """The section of a row, where several share a name and differ by the block."""
    return f"{row['section']} {row['what'].split()[0]}"


def _also(row: dict[str, Any]) -> str:
    more = {name: value for name, value in row.items() if name not in _COLUMNS}
    told = (f"{name.replace('_', ' ')} {value}" for name, value in more.items())
    return "; ".join(told).replace("|", "/")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def filled(text: str) -> str:
    """The page with the formula's tables between their marks."""
    for name, table in tables().items():
        marks = re.compile(rf"(<!-- gpu: {name} -->\n).*?(<!-- /gpu -->)", re.DOTALL)
        assert len(marks.findall(text)) == 1, f"expected one place for the table {name!r}"
        text = marks.sub(lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text)
    return text


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measured(json.loads(Path(sys.argv[1]).read_text())))
    else:
        PAGE.write_text(filled(PAGE.read_text()))
