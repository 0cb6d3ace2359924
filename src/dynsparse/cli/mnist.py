"""`dynsparse mnist`; what its flags mean is in dynsparse.apps.pictures.mnist."""

from __future__ import annotations

from typing import Any

from dynsparse.apps.pictures import mnist as app
from dynsparse.cli.option_flags import with_flags


@with_flags(app.Options)
def mnist(values: dict[str, Any], given: set[str]) -> None:
    """Train a small network with truly sparse layers on digits, MNIST or Fashion-MNIST."""
    app.run(app.Options(**values), given=given)
