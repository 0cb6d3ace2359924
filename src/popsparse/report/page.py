"""The report page, for any run and for a layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynsparse._core.checks import check_kind, check_types
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse._core.version import __version__
from popsparse.machine import Profile
from popsparse.report.buckets import encoding_data, render_encoding
from popsparse.report.charts import esc, number, words
from popsparse.report.comparison import Comparison, render_comparison
from popsparse.report.data import prefix_errors, read_profiles
from popsparse.report.passes import (
    memory_by_category,
    render_balance,
    render_predicted,
    render_tile_contents,
    render_tiles,
    render_timeline,
    render_tree,
)
from popsparse.report.plan import plan_summary, render_plan, render_summary
from popsparse.report.rules import findings, render_findings
from popsparse.report.steps import (
    contents_data,
    live_data,
    render_live_memory,
    render_operations,
    short_names,
    timeline_data,
)

# The page must load nothing, even if a name in the data contains a link.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


_ABOUT = (
    "A simulation: cycles, times and memory come from a model of the machine, not from hardware. "
    "The machine has many small processors, the tiles; each computes on its own memory. All take "
    "the steps of a program together: they synchronise, exchange data, and compute."
)


class Section(NamedTuple):
    """A part of the page: its id, its heading and its HTML."""

    identity: str
    heading: str
    html: str


def _render_links(sections: list[Section]) -> str:
    """Links to the sections; those of one pass, "pass: what", in one group."""
    out: list[str] = []
    last = ""
    for section in sections:
        before, colon, what = section.heading.rpartition(": ")
        link = f'<a href="#{section.identity}">{esc(what)}</a>'
        if colon and before == last:
            out[-1] += f" {link}"
        else:
            out.append(f"{esc(before + colon)}{link}")
        last = before
    return "".join(f"<span>{group}</span>" for group in out)


def _render_page(title: str, subtitle: str, sections: list[Section], data: dict[str, Any]) -> str:
    """The whole page. `data` is the script's input, embedded as JSON."""
    folder = files("popsparse.report")
    style = folder.joinpath("page.css").read_text("utf-8")
    scripts = [folder.joinpath(name).read_text("utf-8") for name in ("page.js", "explore.js")]
    # A "<" in a name must not end the script element.
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    body = "".join(
        f'<section id="{s.identity}"><h2>{esc(s.heading)}</h2>{s.html}</section>\n'
        for s in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{esc(title)}</title><link rel="icon" href="data:,">'
        f"<style>\n{style}</style></head>\n<body>"
        f'<header><h1>{esc(title)}</h1><p class="about">{_ABOUT}</p>'
        f"<nav>{_render_links(sections)}</nav></header>\n<main>\n{body}</main>\n"
        f"<footer>{esc(subtitle)}</footer>\n"
        f'<script type="application/json" id="data">{plain}</script>\n'
        + "".join(f"<script>\n{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )


def write_report(path: str | Path, **contents: Any) -> Path:
    """Write the page of `report_html`, with the same arguments and errors.

    Args:
        path: the file, replaced if it exists; its folder must exist.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    atomic_write_text(path, report_html(**contents))
    return path


def report_html(
    *,
    title: str,
    summary: Mapping[str, Any],
    plan: Mapping[str, Any] | None = None,
    profile: Any = None,
    predicted: Mapping[str, Any] | None = None,
    encoding: Mapping[str, Any] | None = None,
    compared: Comparison | None = None,
) -> str:
    """The page as text. Sections without data are left out.

    All arguments may be plain data (as from `json.load`), so a page can be made of stored figures.

    Args:
        title: heading of the page.
        summary: figures by name. Headlines are "cycles", "seconds", "tflops" (each a number, or a
            mapping of pass to number), "max_tile_bytes", "propagation_steps" and
            "max_relative_error"; "rows", "cols", "batch", "density", "block_size", "dtype",
            "target", ... have labels; others are shown under their own names.
        plan: a result of `popsparse.plan_report` or `DensePlan.to_dict`.
        profile: a `machine.Profile` or its `to_dict()`, or a mapping of pass to either.
        predicted: by pass, the result of `PassTime.to_dict` of the execution model.
        encoding: the result of `encoding_data(partitioner, encoded)`.
        compared: the result of `compare` with another profile.

    Raises:
        TypeError, ValueError: invalid data; the message names the key.
    """
    check_kind("compared", compared, (Comparison, type(None)), "what compare gives")
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"title must be a text that is not empty, got {title!r}")
    check_kind("summary", summary, Mapping, "a mapping")
    for name, value in (("plan", plan), ("predicted", predicted), ("encoding", encoding)):
        check_kind(name, value, (Mapping, type(None)), "a mapping")
    sections: list[Section] = []
    data: dict[str, Any] = {"timelines": {}, "tiles": {}, "maps": {}, "contents": {}, "live": {}}

    def add(identity: str, heading: str, html: str) -> None:
        if html:
            sections.append(Section(identity, heading, html))

    profiles = read_profiles(profile)
    add("summary", "Summary", render_summary(summary))
    if compared is not None:
        add("compared", "Compared", render_comparison(compared))
    if profiles:
        results = [(run.name, findings(run, summary)) for run in profiles]
        add("findings", "What costs most", render_findings(results))
    if plan:
        with prefix_errors("plan"):
            html = render_plan(plan)
        add("plan", "The plan" + (", and why it won" if "Runners-up" in html else ""), html)
    for place, run in enumerate(profiles):
        same = next((i for i, p in enumerate(profiles[:place]) if _same_memory(p, run)), place)
        with prefix_errors(f"profile of {run.name}" if run.name else "profile"):
            _profile_sections(run, f"p{place}", f"p{same}", profiles[same].name, add, data)
    if predicted:
        heading = "Predicted by the execution model" if profiles else "Predicted cycles"
        with prefix_errors("predicted"):
            html = render_predicted(predicted, profiles)
        add("predicted", heading, html)
    if encoding:
        buckets, propagation, maps = render_encoding(encoding)
        add("buckets", "Buckets", buckets)
        add("propagation", "Propagation", propagation)
        for name, values in maps.items():
            shown = values.T if values.shape[0] > values.shape[1] else values
            data["maps"][name] = _numbers(shown.ravel())
    return _render_page(title, f"dynsparse {__version__}", sections, data)


def _profile_sections(
    profile: Profile, key: str, memory: str, memory_of: str, add: Any, data: dict[str, Any]
) -> None:
    """The sections of one pass; their ids begin with `key`.

    `memory` is the key of the first pass with the same memory use, `memory_of` its name.
    """
    before = f"{words(profile.name).capitalize()}: " if profile.name else ""

    def heading(text: str) -> str:
        return before + (text if before else text[0].upper() + text[1:])

    head = render_balance(profile)
    if profile.timeline:
        data["timelines"][key] = timeline_data(profile)
        add(f"{key}-timeline", heading("timeline"), head + render_timeline(profile, key))
    else:
        add(f"{key}-run", heading("run"), head)
    if profile.cycles:
        add(f"{key}-operations", heading("operations"), render_operations(profile))
    if tree := profile.tree():
        html = render_tree(tree, short_names(profile), profile.cycles)
        add(f"{key}-tree", heading("static program"), html)
    if live := render_live_memory(profile, key):
        if memory == key:
            data["contents"][key] = contents_data(profile.contents)
        data["live"][key] = live_data(profile, memory)
        add(f"{key}-memory-steps", heading("memory over the steps"), live)
    is_first = memory == key
    html = render_tiles(profile, key, "" if is_first else memory_of)
    if is_first and live:
        html = render_tile_contents(profile, key) + html
    add(f"{key}-tiles", heading("tiles"), html)
    series = {"received": {"bytes received": profile.received_bytes}}
    if is_first:
        series["memory"] = memory_by_category(profile)
    cycles = {"computing": profile.tile_cycles, "exchanging": profile.tile_exchange}
    if profile.cycles:
        series["cycles"] = {f"cycles {name}": values for name, values in cycles.items()}
    for what, columns in series.items():
        shown = {name: _numbers(values) for name, values in columns.items() if values.any()}
        if shown:
            data["tiles"][f"{key}-{what}"] = shown


def _same_memory(first: Profile, second: Profile) -> bool:
    """Whether every tile has the same memory use in both, as with two passes of one program."""
    a, b = first.memory.by_category, second.memory.by_category
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _numbers(values: np.ndarray) -> list[float | int]:
    """Numbers as short as they can be in JSON."""
    return [int(v) if float(v).is_integer() else round(float(v), 2) for v in values.tolist()]


@check_types
def layer_page(
    layer: Any,
    *,
    title: str | None = None,
    pattern: Any = None,
    summary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The arguments for `write_report` and `save_profile`, about the last run of each pass of a
    layer.

    Args:
        layer: a `popsparse.Layer` with a pattern, after a run of some of its passes.
        title: defaults to the sizes of the product and the machine.
        pattern: the pattern of the run; if given, the page also shows the execution model's
            prediction for it.
        summary: further figures for the head of the page; they override the layer's.

    Raises:
        ValueError: a layer without a run, or one that keeps its weights dense.
    """
    from popsparse.encoding.partitioner import Partitioner
    from popsparse.layer import Layer
    from popsparse.plans import plan_report, predict

    check_kind("layer", layer, Layer, "a popsparse.Layer")
    plan, profiles, encoding = layer.plan, layer.profiles, layer.encoding
    if not profiles or encoding is None:
        raise ValueError("the layer has nothing to report: set a sparse pattern and run a pass")
    head = plan_summary(plan)
    values = len(encoding.positions) * plan.block_dimensions[0] * plan.block_dimensions[1]
    elements = head["rows"] * head["cols"] * plan.sizes.groups
    products = 2.0 * values * plan.sizes.z
    head |= {
        "density": values / elements,
        "nnz": values,
        "cycles": {name: profile.cycles for name, profile in profiles.items()},
        "seconds": {name: profile.seconds for name, profile in profiles.items()},
        "tflops": {name: products / p.seconds / 1e12 for name, p in profiles.items()},
        "max_tile_bytes": max(p.memory.max_tile_bytes for p in profiles.values()),
        "propagation_steps": encoding.info.propagation_steps,
        "spilled": encoding.info.spilled,
        "propagated": encoding.info.propagated,
    }
    sizes = f"{number(head['rows'])} × {number(head['cols'])} by {number(head['batch'])}"
    predicted = None
    if pattern is not None:
        predicted = {n: t.to_dict() for n, t in predict(plan, pattern).items() if n in profiles}
    return {
        "title": title or f"Sparse product {sizes} on {plan.target.name}",
        "summary": head | dict(summary or {}),
        "plan": plan_report(plan),
        "profile": dict(profiles),
        "predicted": predicted,
        "encoding": encoding_data(Partitioner(plan), encoding),
    }


def write_layer_report(path: str | Path, layer: Any, **more: Any) -> Path:
    """Write the page about the last run of each pass of a layer.

    Args:
        path: the file; its folder must exist.
        layer, more: as for `layer_page`, which also raises the errors.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
    """
    return write_report(path, **layer_page(layer, **more))
