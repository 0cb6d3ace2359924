"""Fills the tables of the pages on learning, from the results beside them.

    python benchmarks/learning/tables.py

The results are docs/pictures/why-rigl.jsonl (run.py), small.jsonl (small.py), cifar-short.jsonl
(cifar_lines.py), lenet.jsonl and lenet-methods.jsonl (../lenet.py), blocks-and-order.jsonl
(blocks/run.py and blocks/images.py), character-model.jsonl (../character_model.py), pruned.jsonl,
pruned-10M.jsonl and pruned-times.jsonl (pruned.py), vocabulary.jsonl (vocabulary.py) and
vocabulary-times.jsonl (../sparse_vocabulary.py); a test compares them with the pages. A table
stands between `<!-- learning: NAME -->` and `<!-- /learning -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from blocks.summary import WAYS, cases_table, images_table, ways_table
from small_trials import EXPERIMENTS
from summary import changed_weights, quarters, settings, usual_network, verdicts
from summary import table as table_of_variants

from dynsparse.report.bench import table as markdown

Row = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("why-rigl.md", "small-experiments.md", "cifar.md", "results.md", "blocks-and-order.md",
         "pruned-models.md")  # fmt: skip

METHODS = {"static": "static", "set": "SET", "rigl": "RigL"}

# Settings that differ among the trials of lenet.py, in the order of the table's columns; and
# defaults of settings that share a column, shown if changed. Older results may lack them.
SETTINGS = ("rate", "course", "decay", "dropout", "interval", "end", "initial", "epochs")
BESIDES = {"smoothing": 0.0, "distort": 0.0, "distorted": 1.0, "clean": 0.0}


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (DOCS / "pictures" / name).read_text().splitlines()]


def spread(found: list[float], digits: int = 2) -> str:
    """The mean, with the smallest and largest in parentheses."""
    if len(found) == 1:
        return f"{found[0]:.{digits}f}"
    return (
        f"{statistics.mean(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"
    )


def _found(rows: list[Row], experiment: str, trial: str) -> list[Row]:
    return [r for r in rows if (r["experiment"], r["trial"]) == (experiment, trial)]


def experiment_table(rows: list[Row], name: str) -> str:
    """Error and number of weights of each trial of an experiment."""
    body = []
    for trial in EXPERIMENTS[name].trials:
        found = _found(rows, name, trial)
        errors, weights = [row["error"] for row in found], found[0]["weights"]
        body.append([trial, str(len(found)), spread(errors), f"{weights:,}"])
    return markdown([EXPERIMENTS[name].of, "seeds", "error in %", "weights"], body)


def convolutions_table(rows: list[Row]) -> str:
    """A line per density, a column per method."""
    body = []
    for density in ("0.1", "0.05", "0.02"):
        found = {m: _found(rows, f"conv {density}", m) for m in METHODS}
        cells = [spread([row["error"] for row in found[m]]) for m in METHODS]
        weights = found["rigl"][0]["weights"]
        body.append([density, f"{weights:,}", str(len(found["rigl"])), *cells])
    return markdown(["density", "weights", "seeds", *METHODS.values()], body)


def pruned_table(rows: list[Row]) -> str:
    """A line per method, a column per density: test perplexity."""
    densities = sorted({row["density"] for row in rows} - {1.0}, reverse=True)
    dense = {row["seed"]: row["perplexity"] for row in rows if row["way"] == "dense"}
    seeds = [[r["seed"] for r in rows if (r["way"], r["density"]) == ("wanda", d)]
             for d in densities]  # fmt: skip
    body = [["dense", *(spread([dense[seed] for seed in one]) for one in seeds)]]
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] != "dense"):
        found = [[r for r in rows if (r["way"], r["density"]) == (way, d)] for d in densities]
        body.append([way, *(spread([r["perplexity"] for r in rows]) for rows in found)])
    heads = [
        f"density {d:g}, {len(one)} {'seeds' if len(one) > 1 else 'seed'}"
        for d, one in zip(densities, seeds, strict=True)
    ]
    return markdown(["", *heads], body)


def middle(median: float, low: float, high: float) -> str:
    """A median, with its range in parentheses."""
    digits = 0 if median > 100 else 2
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def pruned_times_table(rows: list[Row]) -> str:
    """A line per density: times of other steps relative to a sparse one, with quartiles."""
    body = []
    for row in rows:
        cells = [middle(median, low, high) for low, median, high in (row["masked"], row["dense"])]
        body.append([f"{row['density']:g}", *cells])
    return markdown(["density", "masked takes", "dense takes"], body)


def vocabulary_table(rows: list[Row]) -> str:
    """A line per density of the table: test perplexity after pruning and after fine-tuning."""
    body = []
    for table in dict.fromkeys(row["table"] for row in rows):
        found = [row for row in rows if row["table"] == table]
        name = table if isinstance(table, str) else "dense" if table == 1 else f"{table:g}"
        body.append([name, *(spread([row[key] for row in found]) for key in ("pruned", "tuned"))])
    seeds = len({row["seed"] for row in rows})
    head = ["density of the table", f"pruned, {seeds} seeds", "after 200 steps of fine-tuning"]
    return markdown(head, body)


def vocabulary_times_table(rows: list[Row]) -> str:
    """A line per case: milliseconds of a step, and relative times of the others."""
    columns = [
        ("sparse blocks, ms", "sparse"),
        ("dense takes", "dense / sparse"),
        ("masked takes", "masked / sparse"),
        ("sparse vocabulary too, ms", "sparse vocabulary"),
        ("dense takes", "dense / sparse vocabulary"),
        ("masked takes", "masked / sparse vocabulary"),
    ]
    body = [
        [f"{row['density']:g}", str(row["batch"]), "no" if row["lean"] else "yes",
         *(middle(*row[name]) for _, name in columns)]
        for row in rows
    ]  # fmt: skip
    return markdown(["density", "sequences", "dropout", *(head for head, _ in columns)], body)


def cifar_table(rows: list[Row]) -> str:
    """A line per density and method; accuracies in percent."""
    body = []
    for density in sorted({row["density"] for row in rows}, reverse=True):
        of_set = {r["seed"]: r for r in rows if (r["density"], r["method"]) == (density, "set")}
        for method, name in METHODS.items():
            found = [r for r in rows if (r["density"], r["method"]) == (density, method)]
            if not found:
                continue
            less = [
                f"{100 * (row['accuracy'] - of_set[row['seed']]['accuracy']):+.2f} ({row['seed']})"
                for row in found
                if method != "set" and row["seed"] in of_set
            ]
            test, training = (
                spread([100 * row[key] for row in found]) for key in ("accuracy", "train_accuracy")
            )
            weights = f"{found[0]['weights']:,}"
            cells = [f"{density:g}", name, weights, str(len(found)), test, ", ".join(less)]
            body.append([*cells, training])
    head = ["density", "method", "weights", "seeds", "test accuracy in %", "less SET's, by seed"]
    return markdown([*head, "of the training images, moved and mirrored"], body)


def lenet_table(rows: list[Row]) -> str:
    """A line per setting, smallest error first; all in percent, on held-out training images."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        besides = [(name, row.get(name, usual)) for name, usual in BESIDES.items()]
        other = ", ".join(f"{name} {value:g}" for name, value in besides if value != BESIDES[name])
        groups.setdefault((*(row[name] for name in SETTINGS), other), []).append(row)

    def percent(at: tuple[Any, ...], key: str) -> str:
        found = [100 * row["sparse"][key] for row in groups[at] if key in row["sparse"]]
        return spread(found) if found else ""

    def error(at: tuple[Any, ...]) -> float:
        return statistics.mean(row["sparse"]["final"] for row in groups[at])

    body = []
    for at in sorted(groups, key=error):
        cells = [f"{value:g}" if isinstance(value, float) else str(value) for value in at]
        figures = [percent(at, key) for key in ("final", "averaged", "best", "training")]
        body.append([*cells, str(len(groups[at])), *figures])
    figures = ["at the end", "of averaged weights", "at the best epoch", "of the training images"]
    return markdown([*SETTINGS, "besides", "seeds", *figures], body)


def lenet_methods_table(rows: list[Row]) -> str:
    """A line per method and distortion of the images; errors in percent."""
    body = []
    for distortion, images in ((1.0, "distorted"), (0.0, "as they are")):
        for method, name in (METHODS | {"dense": "dense"}).items():
            found = [r for r in rows if (r["method"], r["distort"]) == (method, distortion)]
            figures = [
                spread([100 * row["sparse"][key] for row in found])
                for key in ("final", "best", "training")
            ]
            body.append([images, name, str(len(found)), *figures])
    figures = ["at the end", "at the best epoch", "of the training images"]
    return markdown(["images", "network", "seeds", *figures], body)


CHARACTER_MODELS = {
    "dense": "dense",
    "gmp": "gradual magnitude pruning",
    "rigl": "RigL",
    "small": "dense, narrower",
    "set": "SET",
    "static": "static",
}


def character_table(rows: list[Row]) -> str:
    """A line per method; losses in bits per byte."""
    body = []
    for method, name in CHARACTER_MODELS.items():
        found = [row for row in rows if row["method"] == method]
        losses = [spread([row[key] for row in found], 3) for key in ("valid", "training")]
        body.append([name, f"{found[0]['parameters']:,}", str(len(found)), *losses])
    head = ["network", "parameters", "seeds", "validation loss", "training loss"]
    return markdown(head, body)


def all_tables() -> dict[str, str]:
    """All tables by name."""
    of_blocks = read("blocks-and-order.jsonl")
    why, small = read("why-rigl.jsonl"), read("small.jsonl")
    long = [r for r in why if r["steps"] == 2000 and not r["variant"].startswith("masked")]
    usual = [row for row in long if usual_network(row)]
    made = {
        "why-rigl": table_of_variants(usual, "set"),
        "grown weights": changed_weights(usual),
        "verdicts": verdicts(usual),
        "settings": settings(long),
        "quarters": quarters(usual),
        "convolutions": convolutions_table(small),
        "cifar": cifar_table(read("cifar-short.jsonl")),
        "character model": character_table(read("character-model.jsonl")),
        "lenet": lenet_table(read("lenet.jsonl")),
        "lenet methods": lenet_methods_table(read("lenet-methods.jsonl")),
        "pruned": pruned_table(read("pruned.jsonl")),
        "pruned 10M": pruned_table(read("pruned-10M.jsonl")),
        "pruned times": pruned_times_table(read("pruned-times.jsonl")),
        "vocabulary": vocabulary_table(read("vocabulary.jsonl")),
        "vocabulary times": vocabulary_times_table(read("vocabulary-times.jsonl")),
        "blocks": cases_table(of_blocks),
        "blocks on images": images_table(of_blocks),
        "ways to cut blocks": ways_table(of_blocks, WAYS[0]),
        "ways to cut blocks of 64": ways_table(of_blocks, WAYS[1]),
    }
    measured = {(row["experiment"], row["trial"]) for row in small}
    for name, experiment in EXPERIMENTS.items():  # only complete experiments
        if all((name, trial) in measured for trial in experiment.trials):
            made[name] = experiment_table(small, name)
    return made


def filled(text: str, made: dict[str, str]) -> str:
    """The page with its tables replaced."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{made[found[2]]}\n\n<!-- /learning -->"

    marked = r"(<!-- learning: (.+?) -->)\n.*?<!-- /learning -->"
    return re.sub(marked, fill, text, flags=re.S)


def main() -> None:
    made = all_tables()
    for page in PAGES:
        path = DOCS / page
        path.write_text(filled(path.read_text(), made))


if __name__ == "__main__":
    main()
