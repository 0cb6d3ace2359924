"""The budget of gradual pruning: fewer blocks at each update, until the final density."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynsparse.allocation import allocate
from dynsparse.checks import check_choice, check_within
from dynsparse.pattern import SparsePattern
from dynsparse.training.budgets.basic import (
    Budget,
    Counts,
    Survey,
    check_blocks,
    check_one_block_size,
)
from dynsparse.training.schedule import GradualSchedule
from dynsparse.typed import typed

SCOPES = ("layer", "global")


class GradualBudget(Budget):
    """Layers shrink from the blocks they have at the start to those of a final density.

    With a `GradualSchedule` that also replaces blocks, each update first prunes, and then replaces
    the schedule's share of what is left.

    Args:
        final_density: of all layers together at the end, in (0, 1]; None only when `densities`
            names every layer.
        scope: "layer": every layer follows the cubic to its own final number of blocks. "global":
            the total follows it, and the lowest scores of all layers leave; at least one block
            stays in every layer.
        allocation: how the final density is shared among layers, with scope "layer": "uniform",
            "er" or "erk".
        densities: layer name -> its own final density, with scope "layer".

    Raises:
        ValueError: a final density out of range or above that of the start, an unknown scope or
            allocation, layers of several block sizes in one scope.
    """

    changes_capacity = True

    @typed
    def __init__(
        self,
        final_density: float | None,
        *,
        scope: str = "layer",
        allocation: str = "uniform",
        densities: Mapping[str, float] | None = None,
    ) -> None:
        check_choice("scope", scope, SCOPES)
        if scope == "global" and (densities or allocation != "uniform"):
            raise ValueError(
                'with scope "global" the scores decide the densities of the layers: leave out '
                "allocation and densities"
            )
        if final_density is not None:
            check_within("final_density", final_density, "(0, 1]")
        self.final_density = final_density
        self.scope = scope
        self.allocation = allocation
        self.densities = dict(densities or {})
        self.options: dict[str, Any] = {
            "final_density": final_density,
            "scope": scope,
            "allocation": allocation,
            "densities": self.densities,
        }

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        if self.scope == "global":
            check_one_block_size(patterns, 'scope "global"')
        self.first = {name: pattern.nnz for name, pattern in patterns.items()}
        self.final = allocate(
            {name: pattern.shape for name, pattern in patterns.items()},
            self.final_density,
            method=self.allocation,
            block_size={name: pattern.block_size for name, pattern in patterns.items()},
            densities=self.densities,
        )
        if self.scope == "global":
            first, final = sum(self.first.values()), sum(self.final.values())
            if final > first:
                raise ValueError(
                    f"pruning cannot end with {final} blocks in all layers, which have {first} now"
                )
            return
        for name, final in self.final.items():
            if final > self.first[name]:
                raise ValueError(
                    f"pruning cannot end with {final} blocks in layer {name!r}, which has "
                    f"{self.first[name]} now: begin denser, or ask for a smaller final density"
                )

    def counts(self, survey: Survey) -> dict[str, Counts]:
        schedule = survey.schedule
        if not isinstance(schedule, GradualSchedule):
            raise TypeError(f"expected a GradualSchedule, got {type(schedule).__name__}")
        left = schedule.remaining(survey.step)
        pruned = self._global(survey, left) if self.scope == "global" else self._local(survey, left)
        found = {}
        for name, drop in pruned.items():
            replaced = survey.replaced(name, survey.patterns[name].nnz - drop)
            found[name] = Counts(drop + replaced, replaced)
        return found

    def _local(self, survey: Survey, left: float) -> dict[str, int]:
        drops = {}
        for name, pattern in survey.patterns.items():
            final = self.final[name]
            target = final + round((self.first[name] - final) * left)
            drops[name] = max(0, pattern.nnz - target)
        return drops

    def _global(self, survey: Survey, left: float) -> dict[str, int]:
        patterns = survey.patterns
        final = sum(self.final[name] for name in patterns)
        target = final + round((sum(self.first[name] for name in patterns) - final) * left)
        most = [max(0, pattern.nnz - 1) for pattern in patterns.values()]
        drop = min(max(0, sum(p.nnz for p in patterns.values()) - target), sum(most))
        counts = survey.lowest_of_all(drop, most)
        return dict(zip(patterns, counts, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"first": dict(self.first), "final": dict(self.final)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.final = dict(state["first"]), dict(state["final"])

    def check_state(self, state: dict[str, Any]) -> None:
        check_blocks(state, "first", self.first)
        check_blocks(state, "final", self.final)
