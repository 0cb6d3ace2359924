"""Every rule of the report on profiles made by hand: where it fires, and where none does."""

from __future__ import annotations

import pytest

from popsparse.report import findings, operations, read_profiles
from popsparse.report.rules import RULES

EVEN = [100.0] * 10
HALF = [90.0] * 5 + [0.0] * 5
PARTS = ("compute", "exchange", "sync", "host")


def made(*steps, tiles=10, used=EVEN, memory=500, limit=1000, contents=None, tree=()):
    """A profile of some steps (name, kind and what they have)."""
    rows = []
    for name, kind, more in steps:
        row = {"name": name, "kind": kind, "runs": 1, "balance": 0.0, "tiles": 0}
        row |= dict.fromkeys(PARTS, 0)
        rows.append(row | more)
    parts = {part: sum(row[part] for row in rows) for part in PARTS}
    plain = {
        "target": {"name": "mine", "tiles": tiles, "clock_hz": 1e9},
        "cycles": {"total": sum(parts.values()), **parts},
        "seconds": 1e-6,
        "memory": {"limit": limit, "max_tile_bytes": memory, "worst_tile": 3,
                   "by_category": {"always live": memory}},
        "steps": rows,
        "tree": list(tree),
        "tiles": {"bytes": [memory] * tiles, "cycles": used, "exchange": EVEN, "received": EVEN,
                  "sent": EVEN},
    }  # fmt: skip
    if contents is not None:
        plain["contents"] = contents
    return read_profiles(plain)[0]


def compute(cycles, balance=1.0, tiles=10, name="work", **more):
    return name, "compute", {"compute": cycles, "balance": balance, "tiles": tiles, **more}


def held(*variables):
    return {
        "variables": [
            {"name": name, "dtype": "half", "kind": kind, "made_by": [], "on": [[3, 4, size]]}
            for name, kind, size in variables
        ],
        "live": [],
        "vertices": [],
    }


COPY = {"kind": "Copy", "name": "order", "step": 1, "runs": 1, "cycles": 1, "parts": []}

CASES = {
    "memory over": (made(compute(900), memory=1200), 1.2, "Tile 3 needs 1,200 B and has 1,000"),
    "memory near": (
        made(compute(900), memory=950, contents=held(("w", "always live", 70))),
        0.95,
        "95.0\u00a0%); the largest there: w 70 B",
    ),
    "always live": (
        made(compute(9), contents=held(("w", "constant", 400), ("x", "always live", 200))),
        0.6,
        "600 of 1,000 B",
    ),
    "imbalance": (
        # Five tiles compute, for 0.7 of the time: over all ten tiles that is 0.35.
        made(compute(400, 0.35, 5, "uneven"), compute(600)),
        0.12,
        "most in uneven, where the mean tile works 70.0\u00a0% of the time",
    ),
    "tiles unused": (
        made(compute(900, 0.5, 5), ("go", "exchange", {"exchange": 90}), used=HALF),
        0.5 * 900 / 990,
        "5 of 10 tiles compute nothing",
    ),
    "exchange": (
        made(compute(600), ("go", "exchange", {"exchange": 400, "received_bytes": 77})),
        0.4,
        "most of it in go (400 cycles for 77 B)",
    ),
    "sync": (
        made(compute(800), ("go", "exchange", {"sync": 200, "runs": 3})),
        0.2,
        "4 steps of 250 cycles",
    ),
    "host": (made(compute(700), ("in", "host", {"host": 300})), 0.3, "30.0\u00a0% of the cycles"),
    "propagation": (
        made(compute(700), compute(300, 0.01, name="propagation/loop/compute 0")),
        0.3,
        "takes 30.0\u00a0% of the cycles",
    ),
    "below peak": (
        made(compute(1000, flops=400 * 10 * 32, peak_flops=32)),
        0.6,
        "work, which does 40.0\u00a0% of what they could",
    ),
    "rearranging": (
        made(compute(800), compute(150, name="order"),
             ("fetch", "exchange", {"exchange": 0, "compute": 50}), tree=[COPY]),
        0.2,
        "most of it in order",
    ),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_alone(rule):
    profile, share, words = CASES[rule]
    (found,) = findings(profile)
    assert found.rule == rule
    assert found.share == pytest.approx(share)
    assert words in found.text
    # A remedy names an option of the command or a name of the library.
    assert any(name in found.remedy for name in ("--", "Copy([", "create_"))


def test_nothing_stands_out():
    small = [("go", "exchange", {"exchange": 90, "sync": 40}), ("in", "host", {"host": 40})]
    fast = {"flops": 600 * 10 * 128, "peak_flops": 128}
    assert findings(made(compute(830, 0.95, **fast), *small)) == []
    assert findings(made(memory=100)) == []


def test_the_costliest_comes_first_and_what_does_not_fit_before_all():
    steps = [compute(300), ("go", "exchange", {"exchange": 450, "sync": 250})]
    assert [one.rule for one in findings(made(*steps))] == ["exchange", "sync"]
    full = made(*steps, memory=990, contents=held(("w", "always live", 900)))
    rules = [one.rule for one in findings(full)]
    assert rules == ["exchange", "sync", "memory near", "always live"]
    over = made(*steps, memory=1001)
    assert [one.rule for one in findings(over)] == ["memory over", "exchange", "sync"]


def test_operations_by_hand():
    profile = made(
        compute(50, name="net/one/fetch"),
        compute(150, tiles=4, name="net/one/product", flops=128 * 4 * 100, peak_flops=128),
        ("net/one/loop/go", "exchange", {"exchange": 60, "runs": 2}),
        compute(40, name="net/two", flops=1000, peak_flops=32),
        ("net/never", "exchange", {"runs": 0}),
    )
    one, two = operations(profile)
    assert (one.name, one.depth, one.steps, one.runs) == ("one", 1, 3, 4)
    assert (one.cycles, one.flops, one.tiles) == (260, 51200, 10)
    assert one.peak_share == pytest.approx(51200 / (260 * 10 * 128))
    assert one.seconds == pytest.approx(260e-9)
    assert two.peak_share == pytest.approx(1000 / (40 * 10 * 32))
    deep = operations(profile, 3)
    assert [(o.name, o.depth) for o in deep] == [
        ("one", 1), ("one/fetch", 2), ("one/product", 2), ("one/loop", 2), ("one/loop/go", 3),
        ("two", 1),
    ]  # fmt: skip
    assert deep[1].peak_share is None
    assert deep[2].peak_share == pytest.approx(100 / 150)
    with pytest.raises(ValueError, match="depth must be an integer of at least 1"):
        operations(profile, 0)
