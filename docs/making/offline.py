"""No page makes a reader's browser fetch anything from elsewhere, or the strict build fails.

A hook of MkDocs (mkdocs.yml).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source|object)\b[^>]*\b(?:src|href|data)=["'](?:https?:)?//[^>]*"""
    r"""|url\(["']?(?:https?:)?//[^)]*"""
)
log = logging.getLogger("mkdocs.hooks.offline")


def on_post_build(*, config: Any) -> None:
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css"):
            for tag in FETCHED.findall(file.read_text("utf-8")):
                log.warning("%s fetches from elsewhere: %s", file.name, tag)
