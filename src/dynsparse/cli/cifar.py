"""`dynsparse cifar`; what its flags mean is in dynsparse.apps.pictures.cifar."""

from __future__ import annotations

from typing import Any

from dynsparse.apps.pictures import cifar as app
from dynsparse.cli.option_flags import with_flags


@with_flags(app.Options)
def cifar(values: dict[str, Any], given: set[str]) -> None:
    """Train a wide residual network with sparse convolutions on CIFAR-10."""
    app.run(app.Options(**values), given=given)
