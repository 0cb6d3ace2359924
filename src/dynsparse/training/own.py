"""What an algorithm may add to a trainer: steps of its own, a state that follows the pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynsparse.pattern import SparsePattern
from dynsparse.training.change import Change


class OwnParts:
    """All of it is empty here. On several ranks each does the same, and comes to the same."""

    own_state_holds = "slots"
    """What the tensors of `_own_state`, which has one by the name of each layer, hold: an entry for
    each of its slots, or "positions", those of some of them."""

    def _before_step(self) -> None:
        """For algorithms that change gradients before the optimizer's step."""

    def _after_step(self) -> None:
        """For algorithms that change weights after the optimizer's step."""

    def _undo_own(self, planning: bool) -> Callable[[], None]:
        """For algorithms with a state of their own: what puts it back as it is now.

        With `planning` it is what `_after_step` and `_plan_own` may change, otherwise what loading
        does.
        """
        return lambda: None

    def _plan_own(self, changes: dict[str, Change]) -> Any:
        """For algorithms with figures per block, which follow the pattern as the weights do: what
        `_change_own` needs. Nothing is changed yet but the growth's generator."""
        return None

    def _change_own(self, planned: Any) -> None:
        """Take over what was planned; must not fail."""

    def _own_options(self) -> dict[str, Any]:
        """What must agree on loading, beside what the pieces say; plain types."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        """What the algorithm remembers beside its pieces; tensors and plain types."""
        return {}

    def _check_own_state(self, state: Any, patterns: Mapping[str, SparsePattern]) -> None:
        """Raise ValueError unless `state` can be loaded into layers with these patterns."""

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
