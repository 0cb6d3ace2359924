"""The file around the sections of the machine report: one page without anything from outside."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, NamedTuple

from popsparse.report.format import say

# Nothing may be loaded, whatever a name in the data says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Section(NamedTuple):
    """A part of the page: its id, its heading and its HTML."""

    identity: str
    heading: str
    html: str


def _links(sections: list[Section]) -> str:
    """Links to the sections; those of one pass, "pass: what", in one group."""
    out: list[str] = []
    last = ""
    for section in sections:
        before, colon, what = section.heading.rpartition(": ")
        link = f'<a href="#{section.identity}">{say(what)}</a>'
        if colon and before == last:
            out[-1] += f" {link}"
        else:
            out.append(f"{say(before + colon)}{link}")
        last = before
    return "".join(f"<span>{group}</span>" for group in out)


def page(title: str, subtitle: str, sections: list[Section], data: dict[str, Any]) -> str:
    """The whole page. `data` is what the script draws and shows, as JSON inside it."""
    folder = files("popsparse.report")
    style = folder.joinpath("page.css").read_text("utf-8")
    scripts = [folder.joinpath(name).read_text("utf-8") for name in ("page.js", "explore.js")]
    # A "<" in a name must not end the script element.
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    body = "".join(
        f'<section id="{s.identity}"><h2>{say(s.heading)}</h2>{s.html}</section>\n'
        for s in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{say(title)}</title><link rel="icon" href="data:,">'
        f"<style>\n{style}</style></head>\n<body>"
        f"<header><h1>{say(title)}</h1><nav>{_links(sections)}</nav></header>\n<main>\n{body}</main>\n"
        f"<footer>{say(subtitle)}</footer>\n"
        f'<script type="application/json" id="data">{plain}</script>\n'
        + "".join(f"<script>\n{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )
