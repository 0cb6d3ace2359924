"""The tables of the pages on what networks learn are those of the results beside them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "learning"))
import small_trials
import summary
import tables

ROOT = Path(__file__).parents[2]


def marked(page):
    return re.findall(r"<!-- learning: (.+?) -->", (ROOT / "docs" / page).read_text())


@pytest.mark.parametrize("page", tables.PAGES)
def test_a_page_has_the_tables_of_the_results(page):
    text = (ROOT / "docs" / page).read_text()
    assert marked(page)
    assert text.count("<!-- /learning -->") == len(marked(page))
    assert tables.filled(text, tables.all_tables()) == text


def test_every_table_has_its_page():
    shown = [name for page in tables.PAGES for name in marked(page)]
    assert len({*shown}) == len(shown)
    methods = {"conv 0.1", "conv 0.05", "conv 0.02"}  # lines of one table
    assert {*shown} == tables.all_tables().keys() - methods


def test_every_trial_of_an_experiment_has_been_run_with_the_same_seeds():
    rows = tables.read("small.jsonl")
    for name in {row["experiment"] for row in rows}:
        seeds = [
            sorted(r["seed"] for r in rows if (r["experiment"], r["trial"]) == (name, trial))
            for trial in small_trials.EXPERIMENTS[name].trials
        ]
        assert seeds[0], name
        assert all(found == seeds[0] for found in seeds), name


def test_the_same_trial_has_the_same_result_in_every_experiment():
    rows = tables.read("small.jsonl")
    found = {}
    for row in rows:
        trial = small_trials.EXPERIMENTS[row["experiment"]].trials[row["trial"]]
        found.setdefault((trial, row["seed"]), set()).add((row["error"], row["weights"]))
    assert all(len(results) == 1 for results in found.values())


@pytest.mark.parametrize(
    ("gains", "says"),
    [
        ([0.02, 0.02, 0.02], "not refuted"),
        ([0.005, 0.005], "not refuted"),  # just half of the gap
        ([0.03, -0.02, 0.02], "undecided"),  # 0.010, with an error of 0.015
        ([0.0, 0.0, 0.0], "refuted"),
        ([0.004, 0.006, 0.003], "undecided"),  # 0.0043, with an error of 0.0009
        ([0.002, 0.004, 0.003], "refuted"),
        ([-0.02, -0.01], "refuted"),
    ],
)
def test_the_rule_for_explanations(gains, says):
    assert summary.verdict(gains, 0.01) == says


def test_what_a_change_gains_is_measured_with_the_same_seed():
    def row(variant, seed, loss):
        return {"variant": variant, "seed": seed, "valid": [[500, 9.0], [1000, loss]]}

    rows = [
        row("set", 0, 1.0), row("set", 1, 2.0), row("rigl", 0, 1.1), row("rigl", 1, 2.1),
        row("rigl", 2, 7.0), row("rigl, share 0.1", 1, 2.0), row("rigl, share 0.1", 0, 0.9),
        row("rigl, protected", 0, 1.0),
    ]  # fmt: skip
    assert summary.verdicts(rows).splitlines()[2:] == [
        "| share 0.1 | +0.1500 (0.0500) | 2 of 2 | not refuted |"
    ]


def trained(variant, seed, loss, updates=()):
    return {"variant": variant, "seed": seed, "valid": [[1000, loss]], "updates": list(updates)}


def test_a_setting_is_judged_by_what_it_takes_off_the_gap():
    rows = [
        trained("rigl", 0, 1.3), trained("rigl", 1, 1.3), trained("set", 0, 1.0),
        trained("set", 1, 1.1), trained("static", 0, 1.4), trained("static", 1, 1.6),
        trained("rigl, share 0.1", 0, 1.2), trained("rigl, share 0.1", 1, 1.2),
        trained("set, share 0.1", 0, 0.9), trained("set, share 0.1", 1, 1.0),
        trained("rigl, 97 %", 0, 2.0), trained("rigl, 97 %", 1, 2.0), trained("set, 97 %", 0, 2.1),
        trained("set, 97 %", 1, 2.0), trained("static, 97 %", 0, 3.0),
        trained("static, 97 %", 1, 3.2), trained("rigl, interval x 3", 0, 1.0),
    ]  # fmt: skip
    assert [line.split(" | ")[2:] for line in summary.settings(rows).splitlines()[2:]] == [
        # RigL gains 0.1 with the smaller share, and SET does, too.
        ["1.3000", "1.0500", "1.5000", "+0.3000 (0), +0.2000 (1)", "+0.2500 (0.0500)", "", " |"],
        ["1.2000", "0.9500", "1.5000", "+0.3000 (0), +0.2000 (1)", "+0.2500 (0.0500)",
         "+0.0000 (0.0000)", "refuted |"],
        ["2.0000", "2.0500", "3.1000", "-0.1000 (0), +0.0000 (1)", "-0.0500 (0.0500)",
         "+0.3000 (0.1000)", "not refuted |"],
    ]  # fmt: skip


def test_what_becomes_of_grown_weights_counts_each_of_them_alike():
    first = {"grown": 30.0, "wasted": 0.0, "known": 0.0, "inputs": 0.8, "outputs": 0.4, "ever": 0.1}
    last = {"grown": 10.0, "wasted": 0.5, "known": 1.0, "inputs": 0.4, "outputs": 0.8, "ever": 0.2}
    rows = [trained("rigl", 0, 1.0, [first, last]), trained("static", 0, 1.0)]
    assert summary.changed_weights(rows).splitlines()[2:] == [
        "| RigL | 40 | 0.50 | 0.25 | 0.70, 0.50 | 0.20 |"
    ]
