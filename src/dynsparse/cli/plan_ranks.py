"""`dynsparse plan-ranks`; what its flags mean is in dynsparse.apps.plan_ranks."""

from __future__ import annotations

from typing import Any

from dynsparse.apps import plan_ranks as app
from dynsparse.apps.common.applies import check_applies
from dynsparse.cli.option_flags import with_flags

__all__ = ["plan_ranks"]


@with_flags(app.Options)
def plan_ranks(values: dict[str, Any], given: set[str]) -> None:
    """Which grid of ranks is best for a row of sparse layers: every one, with what it costs."""
    options = app.Options(**values)
    options.check()
    check_applies(options, given)
    app.run(options)
