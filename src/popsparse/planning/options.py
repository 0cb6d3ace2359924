"""Options of products and of pattern updates."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from dynsparse.checks import check_integer
from popsparse.planning.params import DataType, data_type, number

Parsed = TypeVar("Parsed")


def flag(value: Any, what: str) -> bool:
    """`value` if it is a bool; a clear error otherwise."""
    if isinstance(value, bool):
        return value
    raise TypeError(f"{what} must be True or False, got {value!r}")


def _unknown(name: Any, known: list[str], what: str) -> ValueError:
    close = difflib.get_close_matches(str(name), known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"the {what}s are {', '.join(known)}"
    return ValueError(f"unknown {what} {name!r}: {hint}")


def parse_options(cls: type[Parsed], value: Parsed | Mapping[str, Any] | None) -> Parsed:
    """Options of a dataclass from a mapping of its fields, or as they are.

    Raises:
        ValueError: an unknown name, with the nearest known one. TypeError: not a mapping.
    """
    if isinstance(value, cls):
        return value
    given = {} if value is None else dict(_items(value, "options"))
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise _unknown(name, known, "option")
    return cls(**given)


@dataclass(frozen=True)
class PlanConstraints:
    """Parts of the plan fixed beforehand; None leaves the choice to the planner."""

    x: int | None = None
    y: int | None = None
    z: int | None = None
    grad_w_exchange_buckets: bool | None = None
    use_dense: bool | None = None

    @classmethod
    def parse(cls, value: Any) -> PlanConstraints:
        """From {"partition": {"x", ..}, "exchange": {"grad_w_exchange_buckets"}, "use_dense"}.

        The original's spellings "gradWExchangeBuckets" and "useDense" are read too.

        Raises:
            ValueError, TypeError: not a mapping, an unknown key, a value of the wrong kind.
        """
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        found: dict[str, Any] = {}
        for section, content in _items(value, "plan_constraints"):
            if section == "partition":
                for key, size in _items(content, "plan_constraints.partition"):
                    if key not in ("x", "y", "z"):
                        raise _unknown(key, ["x", "y", "z"], "partition constraint")
                    found[key] = check_integer(f"plan_constraints.partition.{key}", size, 1)
            elif section == "exchange":
                for key, chosen in _items(content, "plan_constraints.exchange"):
                    if key not in ("grad_w_exchange_buckets", "gradWExchangeBuckets"):
                        raise _unknown(key, ["grad_w_exchange_buckets"], "exchange constraint")
                    name = "plan_constraints.exchange.grad_w_exchange_buckets"
                    found["grad_w_exchange_buckets"] = flag(chosen, name)
            elif section in ("use_dense", "useDense"):
                found["use_dense"] = flag(content, "plan_constraints.use_dense")
            else:
                known = ["partition", "exchange", "use_dense"]
                raise _unknown(section, known, "plan constraint")
        return cls(**found)


def _items(value: Any, what: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping such as {{'x': 4}}, got {value!r}")
    return list(value.items())


@dataclass(frozen=True)
class Options:
    """Options of a sparse layer or product.

    Attributes:
        available_memory_proportion: the part of a tile's memory the plan's temporary data may
            take; when no plan fits, the bound is doubled, then dropped. 0 asks for the plan of
            least temporary memory. (0.6)
        meta_info_bucket_oversize_proportion: spare room of the buckets, >= 0. (0.3)
        do_grad_a_pass, do_grad_w_pass: plan for grad_input, grad_weight too. (False)
        partials_type: type of the partial sums; never narrower than the data, and float32 for
            elements. (float32)
        shared_buckets: grad_input reads the forward buckets; blocks always do. (True)
        optimise_for_speed: spills go where they are met soonest, else where most is free. (True)
        force_bucket_spills: every bucket's content spills; to test the propagation. (False)
        use_actual_worker_split_costs: meta-info counts only the workers in use. (False)
        enable_structured_rearrangements: grad_weight rearranges by transpose vertices rather
            than by plain copies. (True)
        price_propagation: plan with the expected cost of propagation, from the binomial tail of
            the bucket loads; the original prices it at 0. (False)
        plan_constraints: see `PlanConstraints.parse`.

    Raises:
        ValueError, TypeError: an option out of range or of the wrong type.
    """

    available_memory_proportion: float = 0.6
    meta_info_bucket_oversize_proportion: float = 0.3
    do_grad_a_pass: bool = False
    do_grad_w_pass: bool = False
    partials_type: Any = "float32"
    shared_buckets: bool = True
    optimise_for_speed: bool = True
    force_bucket_spills: bool = False
    use_actual_worker_split_costs: bool = False
    enable_structured_rearrangements: bool = True
    price_propagation: bool = False
    plan_constraints: Any = field(default_factory=PlanConstraints)

    def __post_init__(self) -> None:
        for name in ("available_memory_proportion", "meta_info_bucket_oversize_proportion"):
            object.__setattr__(self, name, number(getattr(self, name), name, 0.0, 1e6))
        for item in fields(self):
            if isinstance(item.default, bool):
                flag(getattr(self, item.name), item.name)
        partials = data_type(self.partials_type, "partials_type")
        object.__setattr__(self, "partials_type", partials)
        constraints = PlanConstraints.parse(self.plan_constraints)
        object.__setattr__(self, "plan_constraints", constraints)

    @classmethod
    def parse(cls, value: Options | Mapping[str, Any] | None) -> Options:
        """Options from a mapping; unknown names are an error that names the nearest known one."""
        return parse_options(cls, value)

    def repaired(self, dtype: DataType, is_element: bool) -> Options:
        """The options as carried out: partials no narrower than the data, float32 for elements."""
        wanted: DataType = self.partials_type
        if is_element or wanted.size < dtype.size:
            return replace(self, partials_type=data_type("float32"))
        return self

    def with_passes(self, *, grad_a: bool, grad_w: bool) -> Options:
        return replace(self, do_grad_a_pass=grad_a, do_grad_w_pass=grad_w)


POOLINGS = ("sum", "avg", "max", "none")


@dataclass(frozen=True)
class Update:
    """How a layer's pattern is updated on the machine (RigL).

    The tiles compute the dense gradient of the weights and pool the magnitudes of each block; the
    scores go to the host, which drops and grows; new meta-info and values come back.

    Attributes:
        pooling: how magnitudes of a block become one score: "sum", "avg", "max"; "none" sends the
            gradient as it is, block rows x block columns times as many bytes. ("sum")
        optimizer_slots: tensors of optimizer state that go to the host and come back with the
            values: 1 for momentum, 2 for Adam, where the optimizer runs on the machine. (0)
        available_memory_proportion: the part of a tile's memory that temporary data of the dense
            gradient may take. (0.1, as in Graphcore's application)
        partials_type: of the dense gradient's partial sums. (float32)

    Raises:
        ValueError, TypeError: an option out of range or of the wrong type.
    """

    pooling: str = "sum"
    optimizer_slots: int = 0
    available_memory_proportion: float = 0.1
    partials_type: Any = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.pooling, str) or self.pooling.lower() not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        object.__setattr__(self, "pooling", self.pooling.lower())
        slots = check_integer("optimizer_slots", self.optimizer_slots, 0)
        if slots > 16:
            raise ValueError(f"optimizer_slots must be at most 16, got {slots}")
        name = "available_memory_proportion"
        object.__setattr__(self, name, number(self.available_memory_proportion, name, 0.0, 1e6))
        partials = data_type(self.partials_type, "partials_type")
        object.__setattr__(self, "partials_type", partials)

    @classmethod
    def parse(cls, value: Update | Mapping[str, Any] | None) -> Update:
        """From a mapping; unknown names are an error that names the nearest known one."""
        return parse_options(cls, value)
