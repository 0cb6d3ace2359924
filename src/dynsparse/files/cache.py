"""Where downloads, and what `dynsparse tune` has measured, are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """DYNSPARSE_CACHE_DIR, or the user's cache folder."""
    import platformdirs

    given = os.environ.get("DYNSPARSE_CACHE_DIR")
    return Path(given or platformdirs.user_cache_dir("dynsparse"))
