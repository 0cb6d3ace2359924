"""The report's input profiles, and files of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynsparse._core.checks import check_kind, check_types, shorten
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse._core.files.limits import parse_json
from popsparse.machine import Profile
from popsparse.machine.profile import FORMAT, VERSION, build_document


@contextmanager
def prefix_errors(what: str) -> Iterator[None]:
    """Turn errors of the block into a ValueError that begins with `what`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"the key {error} is missing" if type(error) is KeyError else str(error)
        raise ValueError(f"{what}: {reason[:200]}") from None


def read_profiles(profile: Any) -> list[Profile]:
    """Read one profile, or several by name of the pass.

    Args:
        profile: a `machine.Profile` or its `to_dict()`, or a mapping of names to either, which
            become the profiles' names; None is no profile.

    Raises:
        TypeError, ValueError: not profiles.
    """
    if profile is None:
        return []
    if isinstance(profile, Profile):
        return [profile]
    expected = "a Profile, its to_dict(), or a mapping of pass names to those"
    check_kind("profile", profile, Mapping, expected)
    if "steps" in profile:
        with prefix_errors("profile"):
            return [Profile.from_dict(profile)]
    runs = []
    for name, run in profile.items():
        if not isinstance(run, Profile):
            check_kind(f"profile[{shorten(name)}]", run, Mapping, "a Profile or its to_dict()")
            with prefix_errors(f"profile of {name}" if name else "profile"):
                run = Profile.from_dict(run)
        runs.append(replace(run, name=str(name)))
    return runs


@dataclass(frozen=True)
class StoredProfile:
    """The content of a file.

    Attributes:
        title: title of the page.
        file: the file it was read from.
        profiles: profiles of its runs, by the names of their programs.
        page: the arguments for `report_html` and `write_report`, by name.
    """

    title: str
    file: Path
    profiles: list[Profile]
    page: dict[str, Any]


@check_types
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
        title, profile, summary, plan, predicted, encoding: as for `report_html`.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: invalid data; the message names the key.
        OSError: the file cannot be written.
    """
    more = {"plan": plan, "predicted": predicted, "encoding": encoding}
    content = build_document(title, read_profiles(profile), summary=dict(summary or {}), **more)
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected plain data for the file, got something else: {error}") from None
    atomic_write_text(Path(path), text + "\n")
    return Path(path)


@check_types
def load_profile(path: str | os.PathLike[str]) -> StoredProfile:
    """Read a file that `save_profile`, `dynsparse matmul --profile` or an engine's `autoReport`
    wrote.

    Raises:
        ValueError: not such a profile, or one of another version.
        OSError: the file cannot be read.
    """
    file = Path(path)
    text = file.read_bytes()
    try:
        content = parse_json(text)
    except ValueError:
        raise ValueError(f"{file}: expected a profile, got no JSON of Unicode text") from None
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f"{file}: expected a profile, the key 'format' must be {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{file}: version {VERSION} is known here, got {shorten(content.get('version'))}"
        )
    with prefix_errors(str(file)):
        runs: dict[str, Any] = {}
        for run in content["runs"]:
            program = run["program"]
            count = sum(name.partition(" (run ")[0] == program for name in runs)
            runs[f"{program} (run {count + 1})" if count else program] = run
        profiles = read_profiles(runs)
        page = {key: content[key] for key in ("title", "summary")}
        page |= {key: content[key] for key in ("plan", "predicted", "encoding") if key in content}
        page["profile"] = {run.name: run for run in profiles}
        return StoredProfile(page["title"], file, profiles, page)
