"""Every rule of the report, on hand-made profiles."""

from __future__ import annotations

import numpy as np
import pytest

from popsparse.machine import Contents, HeldVariable, Profile, ProgramNode, StepProfile, Target
from popsparse.machine.memory import MemoryUse
from popsparse.report import findings, operations
from popsparse.report.rules import CYCLE_RULES, MEMORY_RULES


def made(*steps, memory=500, contents=None, tree=()):
    """Make a profile of steps on ten tiles of 1,000 bytes, of which the fourth is fullest."""
    target = Target(name="mine", tiles=10, bytes_per_tile=1000, clock_hz=1e9)
    use = MemoryUse({"always live": np.where(np.arange(10) == 3, memory, 0)}, 1000)
    contents = held() if contents is None else contents
    cycles = sum(step.cycles for step in steps)
    return Profile(target, use, list(steps), contents, cycles=cycles, nodes=list(tree))


def compute(cycles, balance=1.0, tiles=10, name="work", **more):
    """Make a step in which the first tiles compute, with the given balance over all ten."""
    busy = np.where(np.arange(10) < tiles, 10 * balance * cycles / tiles, 0.0)
    return StepProfile(name, "compute", 1, compute=cycles, tile_cycles=busy, **more)


def step(name, kind, runs=1, **more):
    return StepProfile(name, kind, runs, **more)


def held(*variables):
    on = [
        HeldVariable(name, "half", kind, size, [], [(3, 4, size)]) for name, kind, size in variables
    ]
    plain = {"variables": [vars(v) for v in on], "live": [], "vertices": []}
    return Contents.from_dict(plain, 10)


COPY = ProgramNode("Copy", "order", 1, 1, 1.0, [])

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
        "in uneven, where it works 70.0\u00a0% of the time",
    ),
    "tiles unused": (
        made(compute(900, 0.5, 5), step("go", "exchange", exchange=90)),
        0.5 * 900 / 990,
        "5 of 10 tiles compute nothing",
    ),
    "exchange": (
        made(compute(600), step("go", "exchange", exchange=400, received_bytes=np.full(7, 11))),
        0.4,
        "most of it in go (400 cycles for 77 B)",
    ),
    "sync": (
        made(compute(800), step("go", "exchange", 3, sync=200)),
        0.2,
        "4 steps of 250 cycles",
    ),
    "host": (made(compute(700), step("in", "host", host=300)), 0.3, "30.0\u00a0% of the cycles"),
    "propagation": (
        made(compute(700), compute(300, 0.01, name="propagation/loop/compute 0")),
        0.3,
        "takes 30.0\u00a0% of the cycles",
    ),
    "below peak": (
        made(compute(1000, flops=400 * 10 * 32, peak_flops=32)),
        0.6,
        "work, which reaches 40.0\u00a0% of that rate",
    ),
    "rearranging": (
        made(compute(800), compute(150, name="order"),
             step("fetch", "exchange", compute=50), tree=[COPY]),
        0.2,
        "most of it in order",
    ),
}  # fmt: skip


def test_every_rule_has_a_case():
    # And "below peak", which also reads the summary.
    assert len(CASES) == len(MEMORY_RULES) + len(CYCLE_RULES) + 1


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_alone(rule):
    profile, share, words = CASES[rule]
    (found,) = findings(profile)
    assert found.rule == rule
    assert found.share == pytest.approx(share)
    assert words in found.text
    # A remedy names an option of the command or a name of the library.
    assert any(name in found.remedy for name in ("--", "Copy([", "create_"))


def test_existing_settings_are_not_advised():
    profile, _, _ = CASES["below peak"]
    given = {"block_size": 16, "dtype": "float16", "partials": "float32"}
    (found,) = findings(profile, given)
    assert found.remedy.startswith("The peak rate takes float16 partial sums (--partials-type")
    assert "--dtype" not in found.remedy
    (found,) = findings(profile, given | {"partials": "float16"})
    assert found.remedy.startswith("A larger --batch")
    assert "--block-size 16" in findings(profile)[0].remedy


def test_no_rule_fires():
    small = [step("go", "exchange", exchange=90, sync=40), step("in", "host", host=40)]
    fast = {"flops": 600 * 10 * 128, "peak_flops": 128}
    assert findings(made(compute(830, 0.95, **fast), *small)) == []
    assert findings(made(memory=100)) == []
    # The program of a plan with several rectangles asks whether blocks spilled; none did.
    asked = [compute(120, 0.1, 1, f"propagation/{name}") for name in ("begin", "any/predicate")]
    unused = step("propagation/any/loop/compute 0", "compute", runs=0)
    assert findings(made(compute(830, 0.95, **fast), *asked, unused)) == []


def test_rules_are_sorted_by_cost_with_out_of_memory_first():
    steps = [compute(300), step("go", "exchange", exchange=450, sync=250)]
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
        step("net/one/loop/go", "exchange", 2, exchange=60),
        compute(40, name="net/two", flops=1000, peak_flops=32),
        step("net/never", "exchange", 0),
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
