"""Tables on the pages about learning results match the stored results."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "learning"))
import cifar_lines
import small_trials
import summary
import tables

ROOT = Path(__file__).parents[2]


def marked(page):
    return re.findall(r"<!-- learning: (.+?) -->", (ROOT / "docs" / page).read_text())


@pytest.mark.parametrize("page", tables.PAGES)
def test_page_has_the_tables_of_the_results(page):
    text = (ROOT / "docs" / page).read_text()
    assert marked(page)
    assert text.count("<!-- /learning -->") == len(marked(page))
    assert tables.filled(text, tables.all_tables()) == text


def test_every_table_is_on_a_page():
    shown = [name for page in tables.PAGES for name in marked(page)]
    assert len({*shown}) == len(shown)
    methods = {"conv 0.1", "conv 0.05", "conv 0.02"}  # lines of one table
    assert {*shown} == tables.all_tables().keys() - methods


def test_trials_of_an_experiment_have_the_same_seeds():
    rows = tables.read("small.jsonl")
    for name in {row["experiment"] for row in rows}:
        seeds = [
            sorted(r["seed"] for r in rows if (r["experiment"], r["trial"]) == (name, trial))
            for trial in small_trials.EXPERIMENTS[name].trials
        ]
        assert seeds[0], name
        assert all(found == seeds[0] for found in seeds), name


def test_equal_trials_have_equal_results():
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
def test_rule_for_explanations(gains, says):
    assert summary.verdict(gains, 0.01) == says


def trained(variant, seed, valid, train=0.0, test=0.0, updates=()):
    row = {"variant": variant, "seed": seed, "updates": list(updates), "test": test}
    return row | {"valid": [[500, 9.0], [1000, valid]], "train": [[500, 9.0], [1000, train]]}


def test_gain_compares_equal_seeds():
    rows = [
        trained("set", 0, 1.0, 1.0), trained("set", 1, 2.0, 2.0), trained("rigl", 0, 1.1, 1.2),
        trained("rigl", 1, 2.1, 2.2), trained("rigl", 2, 7.0, 7.0),
        trained("rigl, share 0.1", 1, 2.0, 2.2), trained("rigl, share 0.1", 0, 0.9, 1.2),
        trained("rigl, protected", 0, 1.0, 1.0),
    ]  # fmt: skip
    assert [line.split(" | ")[:6] for line in summary.verdicts(rows).splitlines()[2:]] == [
        ["| the gap to SET", "2", "+0.1000 (0.0000)", "", "+0.2000 (0.0000)", ""],
        ["| share 0.1", "2", "+0.1500 (0.0500)", "not refuted", "+0.0000 (0.0000)", "refuted"],
    ]


def test_settings_are_rated_by_the_closed_gap():
    rows = [
        trained("rigl", 0, 1.3), trained("rigl", 1, 1.3), trained("set", 0, 1.0),
        trained("set", 1, 1.1), trained("static", 0, 1.4), trained("static", 1, 1.6),
        trained("rigl, share 0.1", 0, 1.2), trained("rigl, share 0.1", 1, 1.2),
        trained("set, share 0.1", 0, 0.9), trained("set, share 0.1", 1, 1.0),
        trained("rigl, 97 %", 0, 2.0), trained("rigl, 97 %", 1, 2.0), trained("set, 97 %", 0, 2.1),
        trained("set, 97 %", 1, 2.0), trained("static, 97 %", 0, 3.0),
        trained("static, 97 %", 1, 3.2), trained("rigl, interval x 3", 0, 1.0),
    ]  # fmt: skip
    lines = summary.settings(rows).splitlines()[2:]
    assert [line.split(" | ")[3:] for line in lines if "| validation |" in line] == [
        # RigL gains 0.1 with the smaller share, and SET does, too.
        ["1.3000", "1.0500", "1.5000", "+0.2500 (0.0500)", "", " |"],
        ["1.2000", "0.9500", "1.5000", "+0.2500 (0.0500)", "+0.0000 (0.0000)", "refuted |"],
        ["2.0000", "2.0500", "3.1000", "-0.0500 (0.0500)", "+0.3000 (0.1000)", "not refuted |"],
    ]


def test_gap_by_interval_of_the_training_loss():
    rows = [
        trained("set", 0, 1.0, 1.0), trained("set", 1, 2.0, 2.0), trained("static", 0, 5.0, 1.1),
        trained("static", 1, 5.0, 2.3), trained("rigl", 1, 5.0, 5.0),
    ]  # fmt: skip
    assert summary.quarters(rows).splitlines() == [
        "| variant | seeds | 1 to 500 | 501 to 1,000 |",
        "|---|---|---|---|",
        "| static | 2 | +0.0000 (0.0000) | +0.2000 (0.1000) |",
    ]


def test_fate_of_grown_weights_counts_each_equally():
    first = {"grown": 30.0, "wasted": 0.0, "known": 0.0, "inputs": 0.8, "outputs": 0.4, "ever": 0.1}
    last = {"grown": 10.0, "wasted": 0.5, "known": 1.0, "inputs": 0.4, "outputs": 0.8, "ever": 0.2}
    rows = [trained("rigl", 0, 1.0, updates=[first, last]), trained("static", 0, 1.0)]
    assert summary.changed_weights(rows).splitlines()[2:] == [
        "| RigL | 40 | 0.50 | 0.25 | 0.70, 0.50 | 0.20 |"
    ]


def test_accuracies_compare_equal_seeds():
    def row(density, method, seed, accuracy):
        figures = {"weights": 8125, "train_accuracy": 0.5, "accuracy": accuracy}
        return {"density": density, "method": method, "seed": seed, **figures}

    rows = [
        row(0.05, "rigl", 0, 0.61), row(0.1, "rigl", 0, 0.65), row(0.1, "rigl", 1, 0.67),
        row(0.1, "set", 1, 0.66), row(0.1, "set", 0, 0.655), row(0.1, "static", 1, 0.6),
    ]  # fmt: skip
    assert tables.cifar_table(rows).splitlines()[2:] == [
        "| 0.1 | static | 8,125 | 1 | 60.00 | -6.00 (1) | 50.00 |",
        "| 0.1 | SET | 8,125 | 2 | 65.75 (65.50 to 66.00) |  | 50.00 (50.00 to 50.00) |",
        "| 0.1 | RigL | 8,125 | 2 | 66.00 (65.00 to 67.00) | -0.50 (0), +1.00 (1) | "
        "50.00 (50.00 to 50.00) |",
        "| 0.05 | RigL | 8,125 | 1 | 61.00 |  | 50.00 |",
    ]


def test_cifar_command_lines_match_their_names(tmp_path):
    figures = {
        "method": "set", "seed": 3, "dataset": "cifar-10", "epochs": 10, "steps": 3910,
        "updates": 30, "accuracy": 0.5, "loss": 1.0, "train_accuracy": 0.6, "train_loss": 0.9,
        "parameters": {"sparse": 40, "dense": 400}, "layers": [{"weights": 10}, {"weights": 5}],
    }  # fmt: skip
    right, wrong = tmp_path / "set-0.05-3.json", tmp_path / "set-0.05-2.json"
    for path in (right, wrong):
        path.write_text(json.dumps(figures))
    line = cifar_lines.line(right)
    assert (line["density"], line["weights"], line["parameters"]) == (0.05, 15, 40)
    with pytest.raises(SystemExit, match=r"expected .*set-0\.05-2\.json to be named"):
        cifar_lines.line(wrong)


def test_figures_of_the_page_on_pruned_models():
    rows = tables.read("pruned.jsonl")
    found = {(r["density"], r["seed"], r["way"]): r["perplexity"] for r in rows}
    masked = "wanda, masked fine-tuning on the calibration data"
    regained = []
    for density, seed in {key[:2] for key in found if key[0] < 1}:
        at = {way: found[density, seed, way] for d, s, way in found if (d, s) == (density, seed)}
        dense = found[1.0, seed, "dense"]
        for start in ("magnitude", "wanda", "sparsegpt"):
            regained.append((at[start] - at[f"{start}, repair"]) / (at[start] - dense))
        assert at["sparsegpt"] < min(at["magnitude"], at["wanda"])
        assert (at["wanda, repair"] < at[masked]) is (density > 0.1)
        tuned = [at[f"wanda, repair, fine-tuning {way}"] for way in ("static", "SET", "RigL")]
        assert max(tuned) - min(tuned) < 0.03
        assert (max(tuned) < dense) is (density > 0.1)
    text = (ROOT / "docs" / "pruned-models.md").read_text()
    assert f"regains {min(regained):.0%} to".replace("%", "") in text
    assert f"to {max(regained):.0%} of".replace("%", " %") in text


def test_figures_of_a_larger_pruned_model():
    rows = tables.read("pruned-10M.jsonl")
    dense = next(row["perplexity"] for row in rows if row["way"] == "dense")
    regained, tuned = [], []
    for density in {row["density"] for row in rows} - {1.0}:
        at = {row["way"]: row["perplexity"] for row in rows if row["density"] == density}
        starts = ("magnitude", "wanda", "sparsegpt")
        regained += [(at[s] - at[f"{s}, repair"]) / (at[s] - dense) for s in starts]
        masked = at["wanda, masked fine-tuning on the calibration data"]
        assert max(at[f"{s}, repair"] for s in starts) < masked
        tuned.append([at[f"wanda, repair, fine-tuning {way}"] for way in ("static", "SET", "RigL")])
    text = " ".join((ROOT / "docs" / "pruned-models.md").read_text().split())
    said = f"regains {min(regained):.0%} to {max(regained):.0%}".replace("%", "", 1)
    assert said.replace("%", " %") in text
    assert max(max(ways) - min(ways) for ways in tuned) < 1
    for row in tables.read("pruned-times.jsonl"):
        assert (row["masked"][1] < 1) is (row["density"] == 0.5)
        assert row["masked"][1] < 2


def test_figures_of_a_sparse_vocabulary():
    rows = tables.read("vocabulary.jsonl")
    for seed in {row["seed"] for row in rows}:
        tuned = {row["table"]: row["tuned"] for row in rows if row["seed"] == seed}
        blocks = tuned[1.0] - tuned["dense model"]
        assert 0.65 * blocks < tuned[0.5] - tuned[1.0] < 1.65 * blocks
        assert tuned[0.2] - tuned[1.0] > 3 * blocks
    for row in tables.read("vocabulary-times.jsonl"):
        assert row["dense / sparse"][0] < 2
        assert 0.4 < 1 - row["sparse vocabulary"][0] / row["sparse"][0] < 0.6


def test_what_results_say_of_lenet():
    errors = {}
    for row in tables.read("lenet-methods.jsonl"):
        errors.setdefault((row["method"], row["distort"]), []).append(100 * row["sparse"]["final"])
    means = {at: statistics.mean(found) for at, found in errors.items()}
    text = (ROOT / "docs" / "results.md").read_text()
    assert f"So {means['rigl', 1.0]:.2f} % beside the published 1.48 %" in text
    assert means["rigl", 0.0] > 1.48
    for method in ("static", "set", "rigl", "dense"):
        assert 0.5 < means[method, 0.0] - means[method, 1.0] < 0.75
    for distortion in (0.0, 1.0):
        gap = means["static", distortion] - means["dense", distortion]
        closed = (means["static", distortion] - means["rigl", distortion]) / gap
        assert f"{100 * closed:.0f} % {'of the gap' if distortion else 'without'}" in text
        assert means["set", distortion] > means["rigl", distortion]
    assert min(errors["set", 1.0]) > max(errors["rigl", 1.0])
    assert min(errors["set", 0.0]) < max(errors["rigl", 0.0])


def test_what_results_say_of_the_character_model():
    rows = tables.read("character-model.jsonl")
    by_seed = {}
    for row in rows:
        assert row["curve"] == sorted(row["curve"], reverse=True)
        by_seed.setdefault(row["seed"], {})[row["method"]] = row
    for of in by_seed.values():
        order = [m for m in ("gmp", "rigl", "small", "set", "static") if m in of]
        losses = [of[method]["valid"] for method in order]
        assert losses == sorted(losses)
        assert of["rigl"]["curve"][3] < of["static"]["valid"]  # after half of the steps
