"""Memory over the steps of the program, and what lies on a tile: what the page's script shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynsparse.typed import typed
from popsparse.report.contents import ContentsData
from popsparse.report.data import ProfileData
from popsparse.report.format import legend, number, say
from popsparse.report.timeline import short_names
from popsparse.report.tree import steps_of

_MOST_VARIABLES = 1500
"""Variables in a page; the smallest of more are taken together."""
_MOST_VERTICES = 3000
"""Codelets of steps in a page."""
_KINDS = ("constant", "always live", "not always live")


@typed
def memory_steps(profile: ProfileData) -> list[int]:
    """The steps that hold memory, in the order of the program; of all programs if none ran."""
    if profile.contents is None:
        return []
    live = profile.contents.live
    order = steps_of(profile.program) if profile.program else sorted(live)
    return [step for step in order if step in live]


@typed
def peak_step(profile: ProfileData, tile: int | None = None) -> int | None:
    """The step at which most is live, on a tile or on all together; None without contents."""
    steps = memory_steps(profile)
    if not steps or profile.contents is None:
        return None
    return steps[int(profile.contents.over_steps(steps, tile)[1].argmax())]


def contents_data(contents: ContentsData) -> dict[str, Any]:
    """Variables and vertices for the script: [name, type, kind, calls, stretches flat]."""
    kept, _ = _kept(contents)
    rows = [
        [v.name, v.dtype, _KINDS.index(v.kind), ", from ".join(v.made_by), _flat(v.on)]
        for v in (contents.variables[i] for i in kept)
    ]
    return {
        "variables": rows,
        "vertices": [
            [one.step, one.codelet, _flat(one.on)] for one in contents.vertices[:_MOST_VERTICES]
        ],
    }


def _kept(contents: ContentsData) -> tuple[list[int], dict[int, int]]:
    """The largest variables, and their numbers among them."""
    order = np.argsort([-v.bytes for v in contents.variables], kind="stable")
    kept = sorted(order[:_MOST_VARIABLES].tolist())
    return kept, {old: new for new, old in enumerate(kept)}


def _flat(stretches: list[tuple[int, int, int]]) -> list[int]:
    return [value for one in stretches for value in one]


def live_data(profile: ProfileData, contents_of: str) -> dict[str, Any]:
    """The steps for the script: names, what each holds beside the variables that always live, and
    at which pages begin: the peak, on the fullest tile.

    Args:
        contents_of: under which key `contents_data` is.
    """
    assert profile.contents is not None
    steps = memory_steps(profile)
    _, number_of = _kept(profile.contents)
    peak = peak_step(profile, profile.worst_tile)
    names = short_names(profile)
    # From step to step little changes, however much is live.
    changes, before = [], set[int]()
    for step in steps:
        now = {number_of[i] for i in profile.contents.live[step] if i in number_of}
        changes.append([sorted(now - before), sorted(before - now)])
        before = now
    return {
        "contents": contents_of,
        "steps": steps,
        "names": {step: names[step] for step in range(len(names))},
        "changes": changes,
        "runs": [profile.steps[s].runs for s in steps],
        "tile": profile.worst_tile,
        "at": steps.index(peak) if peak is not None else 0,
        "limit": profile.limit,
    }


def live_section(profile: ProfileData, identity: str) -> str:
    """The frame of the charts and of the table of a chosen step."""
    contents = profile.contents
    peak = peak_step(profile)
    if contents is None or peak is None:
        return ""
    always, other = contents.over_steps([peak])
    left = len(contents.variables) - _MOST_VARIABLES
    few = f" The {left:,} smallest variables are left out here." if left > 0 else ""
    return (
        f"<p>On all tiles together {number(float(always[0]))} B are always live; what is not "
        f"reaches {number(float(other[0]))} B, in {say(short_names(profile)[peak])}. Variables "
        "that are never live together may share memory. Click on a step to see what it holds, and "
        f"on a tile below to see its curve.{few}</p>"
        f'<div class="live" data-source="{say(identity)}"><div class="charts"></div>'
        + legend([("c0", "always live"), ("c2", "not always live"), ("pick", "the step chosen")])
        + '<div class="held"></div></div>'
        "<noscript><p>These charts need JavaScript; Python has the same figures.</p></noscript>"
    )
