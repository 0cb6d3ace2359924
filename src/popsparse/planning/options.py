"""Options of products and of pattern updates."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from dynsparse._core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_within,
    shorten,
)
from popsparse.machine.dtypes import DType
from popsparse.planning.params import data_type

Parsed = TypeVar("Parsed")

PARTITION_METHODS = ("strip", "stripv0", "block", "block-naive", "block-group2")
"""How a block-sparse product is distributed over the tiles, see `block_sparse.partition`."""

_STATIC = ("available_memory_proportion", "num_bands", "n_split", "enable_preprocessing")
_BLOCK_SPARSE = ("partition_method", "number_of_pass", "memory_cycle_ratio")

_REPLACEMENTS = {
    "dense_grad": "use Update, or the dense_grad of target_options",
    "verbose_logging": "set the environment variable DYNSPARSE_LOG_LEVEL=DEBUG",
    "fully_connected_pass": "use do_grad_a_pass and do_grad_w_pass",
    "pooling_type": "use the pooling of Update",
}
"""What to use instead of names that are not options here."""


def to_option_name(name: Any) -> Any:
    """Translate PopSparse's name of an option: "partitioner.optimiseForSpeed" becomes
    "optimise_for_speed". Other names are returned unchanged."""
    if not isinstance(name, str):
        return name
    return re.sub("(?<=.)(?=[A-Z])", "_", name.removeprefix("partitioner.")).lower()


def translate_names(options: Any, what: str = "options") -> dict[Any, Any]:
    """The options with names as here.

    Raises:
        ValueError: a name in both spellings. TypeError: not a mapping.
    """
    translated: dict[Any, Any] = {}
    for original, value in _items(options, what, {"available_memory_proportion": 0.5}):
        name = to_option_name(original)
        if name in translated:
            raise ValueError(f"option {name} is given twice, once as {original!r}: leave one out")
        translated[name] = value
    return translated


def _parse_text(value: Any, default: Any) -> Any:
    """Parse the value of an option if it is a text that PopSparse reads: "0.5", "true", JSON."""
    if not isinstance(value, str):
        return value
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(value, value)
    try:
        if isinstance(default, PlanConstraints):
            return json.loads(value)
        if default is None or isinstance(default, (int, float)):
            return float(value) if default is None else type(default)(value)
    except (ValueError, RecursionError):
        pass  # The option's own check raises.
    return value


def _unknown_name_error(name: Any, known: list[str], what: str) -> ValueError:
    if name in _REPLACEMENTS:
        return ValueError(f"unknown {what} {name!r}: {_REPLACEMENTS[name]}")
    close = difflib.get_close_matches(str(name), known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"the {what}s are {', '.join(known)}"
    return ValueError(f"unknown {what} {name!r}: {hint}")


def parse_options(
    cls: type[Parsed], value: Parsed | Mapping[str, Any] | None, known: Sequence[str]
) -> Parsed:
    """Options of a dataclass from a mapping of some of its fields; an instance stays unchanged.

    Names and texts may be PopSparse's, such as {"availableMemoryProportion": "0.5"}.

    Raises:
        ValueError: a name that is not among `known` (the message suggests the nearest); a name in
            both spellings. TypeError: not a mapping.
    """
    if isinstance(value, cls):
        return value
    default, parsed = cls(), {}
    for name, item in translate_names({} if value is None else value).items():
        if name not in known:
            raise _unknown_name_error(name, [*known], "option")
        parsed[name] = _parse_text(item, getattr(default, name))
    return cls(**parsed)


_SECTIONS = {"partition": ["x", "y", "z"], "exchange": ["grad_w_exchange_buckets"]}


@dataclass(frozen=True)
class PlanConstraints:
    """Fixed parts of the plan; None leaves the choice to the planner."""

    x: int | None = None
    y: int | None = None
    z: int | None = None
    grad_w_exchange_buckets: bool | None = None
    use_dense: bool | None = None

    @classmethod
    def parse(cls, value: Any) -> PlanConstraints:
        """Parse {"partition": {"x", ..}, "exchange": {"grad_w_exchange_buckets"}, "use_dense"}.

        PopSparse's spellings are accepted too.

        Raises:
            ValueError, TypeError: not a mapping, an unknown key, an invalid value.
        """
        if isinstance(value, cls):
            return value
        chosen: dict[str, Any] = {}
        example: dict[str, Any] = {"partition": {"x": 4}}
        sections = [] if value is None else _items(value, "plan_constraints", example)
        for section, content in sections:
            section = to_option_name(section)
            what = f"plan_constraints.{section}"
            if section == "use_dense":
                chosen["use_dense"] = check_flag(what, content)
                continue
            if section not in _SECTIONS:
                raise _unknown_name_error(section, [*_SECTIONS, "use_dense"], "plan constraint")
            example = {"x": 4} if section == "partition" else {"grad_w_exchange_buckets": True}
            for key, item in _items(content, what, example):
                key = to_option_name(key)
                if key not in _SECTIONS[section]:
                    raise _unknown_name_error(key, _SECTIONS[section], f"{section} constraint")
                name = f"{what}.{key}"
                chosen[key] = (
                    check_integer(name, item, 1) if len(key) == 1 else check_flag(name, item)
                )
        return cls(**chosen)


def _items(value: Any, what: str, example: dict[str, Any]) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping such as {example}, got {value!r}")
    return list(value.items())


@dataclass(frozen=True)
class Options:
    """Options of a sparse layer or product.

    A dynamic product or layer takes all options except those marked static or block-sparse; a
    static product takes the static ones and `available_memory_proportion`; a block-sparse product
    takes its own three. Defaults are in parentheses.

    Attributes:
        available_memory_proportion: the part of a tile's memory the plan's temporary data may
            take. When no dynamic plan fits, the bound is doubled, then dropped; 0 selects the plan
            with the least temporary memory. (0.6)
        meta_info_bucket_oversize_proportion: spare room of the buckets, >= 0. (0.3)
        do_grad_a_pass, do_grad_w_pass: plan for grad_input, grad_weight too. (False)
        partials_type: type of the partial sums; never narrower than the data, and float32 for
            elements. (float32)
        shared_buckets: grad_input reads the forward buckets; blocks always do. (True)
        optimise_for_speed: spills go to where they are used soonest, else to where most space is
            free. (True)
        force_bucket_spills: every bucket's content spills; to test the propagation. (False)
        use_actual_worker_split_costs: meta-info counts only the workers in use. (False)
        enable_structured_rearrangements: grad_weight rearranges by transpose vertices rather
            than by plain copies. (True)
        price_propagation: plan with the expected cost of propagation, from the binomial tail of
            the bucket loads; the original assigns it no cost. (False)
        plan_constraints: see `PlanConstraints.parse`.
        num_bands: static: number of column bands; 0: the planner chooses. (0)
        n_split: static: number of parts of the dense operand's n columns; 0: the planner chooses.
            (0)
        enable_preprocessing: static: planning sets aside rows and columns with hardly any
            non-zeros. (True)
        partition_method: block-sparse: how products are distributed over tiles, one of
            `PARTITION_METHODS`. ("strip")
        number_of_pass: block-sparse: compute the product in this many sequential parts, which share
            memory: of block rows, or of the sum if the result is sparse. Requires one group and the
            methods strip or stripv0. (1)
        memory_cycle_ratio: block-sparse: weight of a tile's memory against its products in the
            methods block and block-group2, in [0, 1]; None: 0.2.

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
    num_bands: int = 0
    n_split: int = 0
    enable_preprocessing: bool = True
    partition_method: str = "strip"
    number_of_pass: int = 1
    memory_cycle_ratio: float | None = None

    def __post_init__(self) -> None:
        for name in ("available_memory_proportion", "meta_info_bucket_oversize_proportion"):
            value = check_within(name, getattr(self, name), "[0, 1e6]")
            object.__setattr__(self, name, float(value))
        for name, least in (("num_bands", 0), ("n_split", 0), ("number_of_pass", 1)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least))
        for item in fields(self):
            if isinstance(item.default, bool):
                check_flag(item.name, getattr(self, item.name))
        partials = data_type(self.partials_type, "partials_type")
        object.__setattr__(self, "partials_type", partials)
        constraints = PlanConstraints.parse(self.plan_constraints)
        object.__setattr__(self, "plan_constraints", constraints)
        check_choice("partition_method", self.partition_method, PARTITION_METHODS)
        if self.number_of_pass > 1 and not self.partition_method.startswith("strip"):
            raise ValueError(
                f"number_of_pass goes with strip and stripv0, got {self.number_of_pass} for "
                f"{self.partition_method}"
            )
        if self.memory_cycle_ratio is not None:
            ratio = check_within("memory_cycle_ratio", self.memory_cycle_ratio, "[0, 1]")
            if self.partition_method not in ("block", "block-group2"):
                raise ValueError(
                    "memory_cycle_ratio goes with the methods block and block-group2, got "
                    f"{ratio} for {self.partition_method}"
                )

    @classmethod
    def parse(cls, value: Options | Mapping[str, Any] | None, product: str = "dynamic") -> Options:
        """Parse the options of a "dynamic", "static" or "block-sparse" product.

        Raises:
            ValueError: an option that is unknown or of another product (the message suggests the
                nearest known one).
            TypeError: not a mapping.
        """
        others = {*_STATIC[1:], *_BLOCK_SPARSE}
        known = {
            "dynamic": [item.name for item in fields(cls) if item.name not in others],
            "static": [*_STATIC],
            "block-sparse": [*_BLOCK_SPARSE],
        }[product]
        options, default = parse_options(cls, value, known), cls()
        for item in fields(cls):
            name = item.name
            if name not in known and getattr(options, name) != getattr(default, name):
                raise _unknown_name_error(name, known, f"option of a {product} product")
        return options

    def repaired(self, dtype: DType, is_element: bool) -> Options:
        """The effective options: partials no narrower than the data, float32 for elements."""
        if is_element or self.partials_type.size < dtype.size:
            return replace(self, partials_type=data_type("float32"))
        return self

    def with_passes(self, *, grad_a: bool, grad_w: bool) -> Options:
        return replace(self, do_grad_a_pass=grad_a, do_grad_w_pass=grad_w)

    def check_equal(self, requested: Options, what: str) -> None:
        """Raise ValueError for other options than these, with which `what`, as in "the weights
        were", made."""
        changed = [
            f"{item.name} {shorten(made)}, not with {shorten(new)}"
            for item in fields(self)
            if (made := getattr(self, item.name)) != (new := getattr(requested, item.name))
        ]
        if changed:
            raise ValueError(f"{what} made with {'; '.join(changed)}")


POOLINGS = ("sum", "avg", "max", "none")


@dataclass(frozen=True)
class Update:
    """How a layer's pattern is updated on the machine (RigL).

    The tiles compute the dense gradient of the weights and pool the magnitudes of each block; the
    scores go to the host, which drops and grows; new meta-info and values come back.

    Attributes:
        pooling: how magnitudes of a block become one score: "sum", "avg", "max"; "none" sends the
            full gradient, block rows x block columns times as many bytes. ("sum")
        optimizer_slots: number of optimizer state tensors that go to the host and back with the
            values: 1 for momentum, 2 for Adam, if the optimizer runs on the machine. (0)
        available_memory_proportion: the part of a tile's memory that temporary data of the dense
            gradient may take. (0.1, as in Graphcore's application)
        partials_type: type of the dense gradient's partial sums. (float32)

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
        share = self.available_memory_proportion
        share = check_within("available_memory_proportion", share, "[0, 1e6]")
        object.__setattr__(self, "available_memory_proportion", float(share))
        partials = data_type(self.partials_type, "partials_type")
        object.__setattr__(self, "partials_type", partials)

    @classmethod
    def parse(cls, value: Update | Mapping[str, Any] | None) -> Update:
        """Parse a mapping; the error for an unknown name suggests the nearest known one."""
        return parse_options(cls, value, [item.name for item in fields(cls)])
