"""Profiles in files: written for later, read back with every figure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynsparse.files.json_text import parse_json
from dynsparse.files.shorten import shortened
from dynsparse.files.whole import write_text_whole
from dynsparse.typed import typed
from popsparse.machine.profile_file import FORMAT, VERSION, document
from popsparse.report.buckets import buckets_sections
from popsparse.report.data import ProfileData, read_profiles
from popsparse.report.passes import predicted_section
from popsparse.report.plain import listed, need
from popsparse.report.plan import plan_section
from popsparse.report.summary import summary_section

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class StoredProfile:
    """The content of a file.

    Attributes:
        title: as of the page.
        file: where it was read from.
        profiles: of its runs, by the names of their programs.
        page: what `report_html` and `write_report` make a page of, by argument.
    """

    title: str
    file: Path
    profiles: list[ProfileData]
    page: dict[str, Any]


@typed
def save_profile(
    path: str | os.PathLike[str],
    *,
    title: str,
    profile: Any,
    summary: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    predicted: Mapping[str, Any] | None = None,
    encoding: Mapping[str, Any] | None = None,
) -> Path:
    """Write a profile for `dynsparse report` and `load_profile`: JSON.

    Args:
        path: the file, replaced if it exists; its folder must exist.
        title, profile, summary, plan, predicted, encoding: as of `report_html`.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: data of another kind; the message names the key.
        OSError: the file cannot be written.
    """
    names = [one.name for one in read_profiles(profile)]
    several = {} if profile is None else {"": profile}
    if isinstance(profile, Mapping) and "steps" not in profile:
        several = dict(profile)
    runs = [
        (name, one.to_dict() if hasattr(one, "to_dict") else one)
        for name, one in zip(names, several.values(), strict=True)
    ]
    more = {"plan": plan, "predicted": predicted, "encoding": encoding}
    content = document(title, runs, summary=dict(summary or {}), **more)
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected plain data for the file, got something else: {error}") from None
    write_text_whole(Path(path), text + "\n")
    return Path(path)


@typed
def load_profile(path: str | os.PathLike[str]) -> StoredProfile:
    """Read a file that `save_profile`, `dynsparse matmul --profile` or an engine's `autoReport`
    wrote.

    Raises:
        ValueError: no such profile, a damaged one, or one of a later version.
        OSError: the file cannot be read.
    """
    file = Path(path)
    try:
        text = file.read_bytes()
        content = parse_json(text)
        if _HALF.search(text):
            # A lone half of a surrogate pair can be written nowhere.
            json.dumps(content, ensure_ascii=False).encode()
        return _read(content, file)
    except (ValueError, TypeError, RecursionError) as error:
        told = str(error)
        if isinstance(error, (json.JSONDecodeError, UnicodeError)):
            told = "it is not JSON of Unicode text"
        raise ValueError(f"{file}: expected a profile as dynsparse stores it: {told}") from None


def _read(content: Any, file: Path) -> StoredProfile:
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f"the key 'format' must be {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"version {VERSION} is known here, got {shortened(content.get('version'))}"
        )
    what = "the file"
    title = need(content, "title", what)
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"title must be a text that is not empty, got {shortened(title)}")
    runs: dict[str, Any] = {}
    for run in listed(need(content, "runs", what), "runs"):
        program = str(need(run, "program", "a run"))
        count = sum(name.partition(" (run ")[0] == program for name in runs)
        runs[f"{program} (run {count + 1})" if count else program] = run
    page: dict[str, Any] = {"title": title, "summary": need(content, "summary", what)}
    page |= {key: content[key] for key in ("plan", "predicted", "encoding") if key in content}
    for key, value in page.items():
        if key != "title" and not isinstance(value, Mapping):
            raise TypeError(f"{key} must be a mapping, got {type(value).__name__}")
    profiles = read_profiles(runs)
    _check_sections(page, profiles)
    page["profile"] = runs
    return StoredProfile(title, file, profiles, page)


def _check_sections(page: Mapping[str, Any], profiles: list[ProfileData]) -> None:
    """Make what is read key by key where it is shown, so that it is refused here."""
    makers: dict[str, Callable[[Any], object]] = {
        "summary": summary_section,
        "plan": plan_section,
        "predicted": lambda data: predicted_section(data, profiles),
        "encoding": buckets_sections,
    }
    for key, make in makers.items():
        try:
            if key in page:
                make(page[key])
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"{key} is damaged: {shortened(told)}") from None
