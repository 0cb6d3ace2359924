"""`dynsparse mnist-transformer`; what its flags mean is in dynsparse.apps.pictures.transformer."""

from __future__ import annotations

from typing import Any

from dynsparse.apps.pictures import transformer as app
from dynsparse.cli.option_flags import with_flags


@with_flags(app.Options)
def mnist_transformer(values: dict[str, Any], given: set[str]) -> None:
    """Train a transformer with truly sparse projections on the rows of small pictures."""
    app.run(app.Options(**values), given=given)
