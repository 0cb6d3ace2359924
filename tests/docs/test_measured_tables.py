"""Tables of pages are those of the stored figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from page_tables import cells_of

ROOT = Path(__file__).parents[2]
LAYERS = ("768 -> 768", "768 -> 3072", "3072 -> 768")


def figures(name: str, folder: str = "results") -> dict:
    return json.loads((ROOT / "benchmarks" / folder / name).read_text())


def words_of(page: str) -> str:
    """Return the text of a page, with single spaces."""
    return " ".join((ROOT / "docs" / page).read_text().split())


@pytest.mark.parametrize(
    ("file", "after"),
    [
        ("deploy-xeon.json", "What it gains: times of onnxruntime"),
        ("deploy-zen3.json", "The same on one thread of an EPYC with AVX2"),
    ],
)
def test_onnxruntime(file, after):
    rows = cells_of("deploy.md", "| layer or model, samples ", after=after)
    measured = figures(file)["onnxruntime"]
    assert [row[1:] for row in rows] == [
        [f"{ratio:.2f}" for ratio in row.values()] for row in measured.values()
    ]


@pytest.mark.parametrize(
    ("file", "after"),
    [
        ("deploy-zen3.json", "What it gains: the time of onnxruntime"),
        ("deploy-xeon.json", "The same on one thread of a Xeon"),
    ],
)
def test_int8(file, after):
    rows = cells_of("deploy.md", "| blocks, samples ", after=after)
    measured, first = figures(file)["int8"], ""
    assert len(rows) == 21
    kinds = {"int8 weights and activations": "int8 both"}
    for name, kind, *ratios in rows:
        first = name or first
        blocks, samples = first.replace("elements", "1").split(", ")
        found = [measured[f"{layer}, blocks of {blocks}, {samples} samples"] for layer in LAYERS]
        assert ratios == [f"{row[kinds.get(kind, kind)]:.2f}" for row in found]


def test_int8_with_half_of_the_weights():
    text, times = words_of("deploy.md"), {1: [], 8: []}
    half = figures("deploy-zen3.json")["int8 half"]
    for samples, rows in times.items():
        rows += [half[f"{name}, blocks of 1, {samples} samples"] for name in LAYERS]
    few, more = ([row["float32"] / row["int8 weights"] for row in rows] for rows in times.values())
    assert f"{min(few):.2f} to {max(few):.2f} of the time of float32 for 1 sample" in text
    assert f"and {min(more):.2f} to {max(more):.2f} for 8, but" in text
    dense = [1 / row["int8 weights"] for rows in times.values() for row in rows]
    assert f"but {min(dense):.1f} to {max(dense):.1f} times that of dense int8" in text


def test_int8_over_float32():
    text = words_of("deploy.md")
    epyc, xeon = (figures(f"deploy-{name}.json")["int8"] for name in ("zen3", "xeon"))

    def span(measured, block, samples, kind="int8 weights"):
        rows = [measured[f"{n}, blocks of {block}, {s} samples"] for n in LAYERS for s in samples]
        times = [row["float32"] / row[kind] for row in rows]
        return f"{min(times):.2f} to {max(times):.2f}"

    both = "int8 both"
    few, many = (1, 8), (128,)
    assert f"{span(epyc, 16, few)} on the EPYC and {span(xeon, 16, few)} on the Xeon" in text
    assert f"as well, {span(epyc, 16, few, both)} and {span(xeon, 16, few, both)}." in text
    assert f"dominates: {span(epyc, 16, many)} and {span(xeon, 16, many)}" in text
    assert f"activations {span(epyc, 16, many, both)} and {span(xeon, 16, many, both)}." in text
    assert f"take {span(epyc, 4, (1,))} and {span(xeon, 4, (1,))} for 1 sample" in text
    assert f"and {span(epyc, 4, (8,))} and {span(xeon, 4, (8,))} for 8." in text
    assert f"size: {span(epyc, 1, (1,))} for 1 sample on the EPYC." in text
    assert f"slower: {span(epyc, 1, (8,))} and {span(xeon, 1, (8,))}." in text
    assert f"128 they take {span(epyc, 1, many)} and {span(xeon, 1, many)}." in text
    assert all(row[kind] < 1.5 for n, row in xeon.items() if ", 128 " in n for kind in row)
    assert all(row["int8 weights"] < 1 for n, row in xeon.items() if "blocks of 1," in n)


@pytest.mark.parametrize(
    ("file", "after"),
    [("peers-zen3.json", "## Training steps"), ("peers-xeon.json", "one thread of a Xeon")],
)
def test_peers(file, after):
    rows = cells_of("comparison.md", "| features | samples ", after=after)
    measured = figures(file)["layers"]
    assert 4 * len(rows) == len(measured)
    names = ("sparselab", "SparseProp", "torch CSR", "masked, compiled")
    for features, samples, *ratios in rows:
        layer = f"{features.replace(',', '')}, batch {samples.replace(',', '')}, "
        for name, told in zip(names, ratios, strict=True):
            found = [row[name] for what, row in measured.items() if what.startswith(layer)]
            assert told == f"{min(found):.1f} to {max(found):.1f}"


def test_dense_products_in_bfloat16():
    measured = figures("xeon.json", "figures")
    ratios: dict[float, list[float]] = {}
    for cell in measured["benchmarks"]["medium"]["cells"]:
        found = ratios.setdefault(cell["density"], [])
        found.append(cell["ratios"]["dense_medium"]["median"])
    text = words_of("when-is-it-faster.md")
    assert "slower than sparse ones at a density of 0.1, and most of them faster at 0.3." in text
    assert min(ratios[0.1]) > 1
    assert statistics.median(ratios[0.3]) < 1


def test_models_in_bfloat16_gain_with_blocks_alone():
    measured = figures("xeon.json", "figures")
    ratios: dict[int, list[float]] = {1: [], 16: []}
    for name in ("models-text", "models-images"):
        for cell in measured["benchmarks"][name]["figures"]["cells"]:
            if cell["dtype"] == "bfloat16":
                ratios[cell["block"]].append(cell["whole"]["ratios"]["dense"]["median"])
    assert "gains nothing from sparsity in bfloat16" in words_of("when-is-it-faster.md")
    assert max(ratios[1]) < 1.05
    assert min(ratios[16]) > 1.1


def test_a_step_of_a_tiny_layer():
    measured = figures("xeon.json", "figures")
    cells = measured["benchmarks"]["overhead-step"]["cells"]
    slower = [c["times"]["dynsparse"]["median"] / c["times"]["dense"]["median"] for c in cells]
    text = words_of("when-is-it-faster.md")
    assert f"of 16 x 16 takes {min(slower):.1f} to {max(slower):.1f} times as long" in text


def test_experts():
    rows = cells_of("make-your-model-sparse.md", "| density | training step, ")
    machines = [figures(f"experts-{name}.json") for name in ("xeon", "zen3")]
    for density, *told in rows:
        spreads = [m[what][f"density {density}"] for m in machines for what in ("step", "forward")]
        assert told == ["{:.1f} ({:.1f} to {:.1f})".format(*spread) for spread in spreads]
    assert len(rows) == 3


def test_nerva():
    rows = cells_of("comparison.md", "| density | Nerva, ")
    measured = zip(
        *(figures(f"nerva-{name}.json")["steps"] for name in ("zen3", "xeon")), strict=True
    )
    for (density, *told), machines in zip(rows, measured, strict=True):
        assert {float(density)} == {row["density"] for row in machines}
        spreads = [row["ratios"][name] for row in machines for name in ("Nerva", "dense")]
        assert told == [f"{middle:.1f} ({low:.1f} to {high:.1f})" for low, middle, high in spreads]


def test_the_demonstration_of_sparselab():
    text = words_of("comparison.md")
    step, memory, loss = figures("peers-xeon.json")["gpt"].values()
    assert f"takes {step['sparselab'][1]:.1f} times as long with sparselab" in text
    assert f"and {step['dense'][1]:.1f} times as long dense" in text
    assert f"is {memory['sparselab']:.2f} and {memory['dense']:.2f} times" in text
    assert f"{loss['dynsparse']:.4f}" == f"{loss['sparselab']:.4f}"
    assert f"the same loss, {loss['sparselab']:.4f}" in text


def test_weight_sparse_transformers():
    rows = cells_of("weight-sparse.md", "| width | density ", after="## What a step costs")
    for (width, density, weights, ratio, spread), row in zip(
        rows, figures("weight-sparse.json")["steps"], strict=True
    ):
        assert (int(width.replace(",", "")), float(density)) == (row["width"], row["density"])
        assert float(weights.split()[0]) == float(f"{12 * row['width'] ** 2 / 1e6:.3g}")
        assert ratio == f"{row['ratio']:.1f}"
        assert spread == f"{row['least']:.1f} to {row['largest']:.1f}"
    losses = figures("weight-sparse.json")["losses"]
    for method, loss in cells_of(
        "weight-sparse.md", "| method | test loss", after="## What it learns"
    ):
        of_seeds = losses[method.strip("`")]
        assert len(of_seeds) == len(losses["seeds"])
        mean = statistics.mean(of_seeds)
        assert loss == f"{mean:.3f} ({min(of_seeds):.3f} to {max(of_seeds):.3f})"
    text = words_of("weight-sparse.md")
    assert f"`rigl` ends at {losses['rigl, sparse embeddings']:.3f} with one seed" in text
    above = [
        keep - other
        for method in ("rigl", "gmp")
        for keep, other in zip(losses["keep"], losses[method], strict=True)
    ]
    assert f"{min(above):.3f} to {max(above):.3f} above the others" in text


def test_circuits_of_weight_sparse_transformers():
    measured = figures("weight-sparse.json")["circuits"]
    rows = cells_of("weight-sparse.md", "| task | model |")
    assert len(rows) == 4
    for task, model, *told in rows:
        method = "rigl" if "RigL" in model else "dense"
        found = [row for row in measured if (row["task"], row["method"]) == (task, method)]
        assert [row["seed"] for row in found] == [0, 1]
        for column, form, text in zip(
            ("loss", "of", "nodes", "edges"), (".3f", ".3f", ",", ","), told, strict=True
        ):
            assert text == " and ".join(f"{row[column]:{form}}" for row in found)
    told = {}
    for column in ("nodes", "edges"):
        pairs = {(row["seed"], row["task"], row["method"]): row[column] for row in measured}
        ratios = [pairs[(*key[:2], "dense")] / n for key, n in pairs.items() if key[2] == "rigl"]
        told[column] = min(ratios), max(ratios)
    text = words_of("weight-sparse.md")
    assert "{:.1f} to {:.1f} times fewer nodes".format(*told["nodes"]) in text
    assert "{:.0f} to {:.0f} times fewer edges".format(*told["edges"]) in text


def test_the_plot_of_the_readme():
    found = json.loads((ROOT / "docs" / "pictures" / "loss-against-time.json").read_text())
    text = " ".join((ROOT / "README.md").read_text().split())
    settings, weights, losses = (found[k] for k in ("settings", "parameters", "losses"))
    assert f"{settings['layers']} layers of {settings['width']} features" in text
    assert f"{weights['dense'] / 1e6:.1f} million weights dense" in text
    assert f"{weights['sparse'] / 1e6:.1f} million in all; {settings['steps']} steps" in text
    times = {name: curve[-1][1] for name, curve in losses.items()}
    assert f"in {times['sparse'] / times['masked']:.2f} of the time" in text
    for (*_, own), (*_, twin) in zip(losses["sparse"], losses["masked"], strict=True):
        assert abs(own - twin) < 2e-3


def test_data_types_of_mnist():
    measured = figures("mnist-types-zen3.json")["data types"]
    rows = cells_of("mnist.md", "| `--data-type` | test accuracy ")
    assert [row[0] for row in rows] == [*measured]
    for (_, mean, spread, skipped), runs in zip(rows, measured.values(), strict=True):
        accuracies = [100 * run["accuracy"] for run in runs]
        assert mean == f"{statistics.mean(accuracies):.2f} %"
        assert spread == f"{min(accuracies):.2f} to {max(accuracies):.2f} %"
        assert {(int(skipped), 11_250)} == {(run["skipped"], run["steps"]) for run in runs}


def test_large_outputs():
    measured = figures("large-outputs-zen3.json")
    rows = cells_of("large-outputs.md", "| output layer | weights |")
    assert len(rows) == len(measured["calls"])
    for (_, weights, *told), found in zip(rows, measured["calls"].values(), strict=True):
        assert weights == f"{found['weights']:,}"
        for text, seeds in zip(
            told, (found["precision at 1"], found["precision at 5"]), strict=True
        ):
            low, high = min(seeds), max(seeds)
            assert text == f"{statistics.mean(seeds):.3f} ({low:.3f} to {high:.3f})"
    rows = cells_of("large-outputs.md", "| output layer | 100,000 labels |")
    for (_, *told), name in zip(rows, ("fan-in", "elements", "RigL"), strict=True):
        assert told == [f"{column[name]['step']:.2f}" for column in measured["costs"].values()]
    text = (ROOT / "docs" / "large-outputs.md").read_text()
    for name, words in {
        "fan-in": "with a static pattern",
        "RigL": "with RigL",
        "bottleneck": "with the bottleneck",
    }.items():
        assert f"{measured['peak'][name]:.1f} GB {words}" in text.replace("of memory ", "")


@pytest.mark.parametrize(
    ("file", "width", "header", "target"),
    [
        ("reinforcement-zen3.json", "1024", "| network | weights ", -200),
        ("reinforcement-zen3.json", "2048", "| network, width 2,048 ", -200),
        ("reinforcement-xeon.json", "1024", "| network, Reacher ", -10),
    ],
)
def test_reinforcement_learning(file, width, header, target):
    measured = figures(file)
    start, runs, times = measured["settings"]["start"], measured["runs"][width], measured["times"]
    rows = cells_of("reinforcement.md", header)
    assert len(rows) == len(runs)
    base = 0.0
    for (_, weights, update, steps, share), (name, run) in zip(rows, runs.items(), strict=True):
        reached = [_first_above(episodes, target) for episodes in run["episodes"]]
        assert len(reached) == 3
        mean = statistics.mean(reached)
        speed = times[width][name][1]
        base = base or mean - start
        assert weights == f"{run['weights']:,}"
        assert update == f"{speed:.2f}"
        assert steps == f"{mean:,.0f} ({min(reached):,} to {max(reached):,})"
        assert share == f"{(mean - start) / base / speed:.2f}"


def test_what_a_mask_and_fewer_weights_cost_in_reinforcement_learning():
    times = figures("reinforcement-zen3.json")["times"]["2048"]
    text = words_of("reinforcement.md")
    assert f"{times['static-0.05'][1]:.1f} times as fast at density 0.05" in text
    assert f"slower than dense ({times['masked-0.1'][1]:.2f})" in text


def test_all_networks_end_alike_on_reacher():
    runs = figures("reinforcement-xeon.json")["runs"]["1024"].values()
    ends = [
        statistics.mean(total for seed in run["episodes"] for _, total in seed[-20:])
        for run in runs
    ]
    text = words_of("reinforcement.md")
    assert "of the last 20 episodes differ by less than 0.2 between the five" in text
    assert max(ends) - min(ends) < 0.2


def _first_above(episodes: list, least: float) -> int:
    """The step after the first five episodes whose mean return is at least this."""
    returns = [total for _, total in episodes]
    means = [statistics.mean(returns[i - 4 : i + 1]) for i in range(4, len(returns))]
    return episodes[4 + next(i for i, mean in enumerate(means) if mean >= least)][0]
