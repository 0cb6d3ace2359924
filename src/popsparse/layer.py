"""A sparse product with its programs built once.

Files use the safetensors format: for each group the positions of its blocks, int64, and its
values; the rest is JSON metadata. A file contains no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from dynsparse._core.checks import check_kind, check_types, shorten
from dynsparse._core.files.atomic_write import atomic_write
from dynsparse._core.files.limits import parse_json
from dynsparse.nn.weights_file import read_tensors
from popsparse.encoding.partitioner import EncodedPattern
from popsparse.formats import COOMatrix, to_numpy
from popsparse.machine import (
    Engine,
    Graph,
    OutOfMemoryError,
    Profile,
    Program,
    Sequence,
    Target,
)
from popsparse.planning.options import Options, PlanConstraints, Update
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.plan import PASSES, Plan
from popsparse.planning.search import make_plan
from popsparse.programs.dense_weights import DensePartitioner, operations
from popsparse.programs.update import UpdatePrograms

_FORMAT = "dynsparse layer 1"
_PARTS = ("rows", "columns", "values")


def _plan_request(plan: Plan) -> dict[str, Any]:
    """The arguments from which `make_plan` makes the same plan again."""
    options = {**asdict(plan.options), "partials_type": plan.options.partials_type.name}
    return {
        "target": plan.target.to_dict(),
        "dtype": plan.dtype.name,
        "params": asdict(plan.params),
        "options": options,
    }


def _plan_from_request(request: Any) -> Plan:
    options = dict(request["options"])
    options["plan_constraints"] = PlanConstraints(**options["plan_constraints"])
    params = dict(request["params"])
    params["sparsity_params"] = SparsityParams(**params["sparsity_params"])
    target, dtype = Target(**request["target"]), request["dtype"]
    return make_plan(target, dtype, FullyConnectedParams(**params), Options(**options))


_NAMES = {"x": "gradient", "y": "input"}


class Layer:
    """A sparse layer of one plan on a simulated machine: patterns in, products and profiles out.

    The program is built once; patterns and values change without a rebuild.

    >>> from popsparse.machine import Target
    >>> from dynsparse.pattern import SparsePattern
    >>> from popsparse.planning.search import plan
    >>> import torch
    >>> layer = Layer(plan(64, 32, 8, 0.1, target=Target(tiles=4)))
    >>> pattern = SparsePattern.random((64, 32), 0.1)
    >>> layer.set_weights(pattern, torch.ones(pattern.nnz))
    >>> layer.forward(torch.ones(8, 32)).shape
    (8, 64)
    >>> layer.profiles["forward"].cycles > 0
    True

    Args:
        plan: a plan of `popsparse.plan`, `make_plan` or `matmul_plan`.
        passes: the passes of the plan to build; defaults to all of them.
        update: how the pattern is updated on the machine: an `Update` or a mapping of its fields.
            None omits the programs "scores" and "rewire".
        numerics: whether to compute numbers. False makes only the profile, in less time.
        check_memory: whether a tile that overflows is an error.

    Attributes:
        profiles: profiles of the last run of each pass, and of "scores" and "rewire", by name.
        encoding: the encoded pattern of `set_weights` or `set_pattern`; its `.info` has the bucket
            figures. None before the first call, and for dense weights.

    Raises:
        OutOfMemoryError: a tile overflows.
        ValueError: a pass the plan does not include; a dense gradient that does not fit in any
            number of pieces.
    """

    @check_types
    def __init__(
        self,
        plan: Plan,
        *,
        passes: Any = None,
        update: Update | dict[str, Any] | None = None,
        numerics: bool = True,
        check_memory: bool = True,
    ) -> None:
        self.plan = plan
        self.numerics = numerics
        names = [name for name in PASSES if name in plan.costs]
        if passes is not None and not isinstance(passes, Iterable):
            raise TypeError(f"passes must be names such as {PASSES}, got {shorten(passes)}")
        requested = names if passes is None else list(passes)
        for name in requested:
            if not isinstance(name, str) or name not in names:
                raise ValueError(f"the plan is for {', '.join(names)}, not for {shorten(name)}")
        updating = None if update is None else Update.parse(update)
        self._built: dict[str, Any] = {
            "passes": requested,
            "update": updating and {**vars(updating), "partials_type": str(updating.partials_type)},
            "numerics": numerics,
            "check_memory": check_memory,
        }
        self.profiles: dict[str, Profile] = {}
        self._encoded: EncodedPattern | None = None
        self._has_values = False  # Whether the machine's values belong to the pattern.
        build = operations(plan)
        self._partitioner = build.partitioner(plan)
        graph = Graph(plan.target)
        self._weights = build.create_weights(graph, plan, "weights")
        needed = {"forward": "y", "grad_input": "x", "grad_weight": "xy"}
        dims = {dim for name in requested for dim in needed[name]}
        operands = {
            dim: build.create_operand(graph, plan, dim, _NAMES[dim])
            for dim in sorted(dims if updating is None else {*"xy"})
        }
        programs: dict[str, Program] = {}
        for name in requested:
            program = Sequence()
            if name == "grad_weight":
                both = operands["x"], operands["y"]
                result = build.add_grad_weight(graph, self._weights, *both, program)
            else:
                operand = operands[needed[name]]
                result = build.add_product(graph, self._weights, operand, program, name)
            graph.add_handle(f"{name} result", result)
            programs[name] = program
        self._update: UpdatePrograms | None = None
        if updating is not None:
            both = operands["x"], operands["y"]
            self._update = UpdatePrograms(graph, self._weights, *both, updating)
            programs |= self._update.programs
        graph.add_handle("words", self._weights.meta_info)
        graph.add_handle("values", self._weights.nz_values)
        for dim, tensor in operands.items():
            graph.add_handle(_NAMES[dim], tensor)
        try:
            self.engine = Engine(graph, programs, numerics=numerics, check_memory=check_memory)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{error}; use a smaller batch, a lower available_memory_proportion or more tiles, "
                "or run anyway with popsparse.Layer(..., check_memory=False)"
            ) from error
        if self._update is not None:
            self._update.connect(self.engine)

    @property
    def encoding(self) -> EncodedPattern | None:
        return None if self.plan.use_dense else self._encoded

    @check_types
    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the plan, the constructor's settings, and the weights that the machine holds.

        The file does not contain programs: they follow from the plan, and `load` builds them.

        Args:
            file: the path; written atomically.

        Raises:
            OSError: the file cannot be written.
            ValueError: a pattern whose values are not set.
            TypeError: a plan whose target or options are of a custom class.
        """
        weights = self._matrices()
        about = {
            "groups": len(weights),
            "built": self._built,
            "plan": _plan_request(self.plan),
        }
        arrays = {
            f"{name} {group}": torch.from_numpy(np.ascontiguousarray(part))
            for group, values in enumerate(weights)
            for name, part in zip(
                _PARTS, (values.row_indices, values.column_indices, values.nz_values), strict=True
            )
        }
        text = json.dumps(about, allow_nan=False)
        content = save(arrays, {"format": _FORMAT, "layer": text})
        atomic_write(Path(file), lambda stream: stream.write(content))

    @classmethod
    @check_types
    def load(cls, file: str | os.PathLike[str]) -> Layer:
        """Load a layer that `save` wrote, with its plan and target.

        Raises:
            OSError: the file cannot be read.
            ValueError: not such a file, a damaged one, or a plan of another version of the planner.
            OutOfMemoryError: as in the constructor (a ValueError).
        """
        try:
            metadata, tensors = read_tensors(Path(file))
            if metadata.get("format") != _FORMAT:
                raise ValueError("expected a layer as popsparse.Layer.save writes it")
            about = parse_json(str(metadata.get("layer")))
            try:
                plan, groups = _plan_from_request(about["plan"]), about["groups"]
            except (KeyError, TypeError) as error:
                raise ValueError(f"expected the plan of a layer, got {error}") from None
            if groups not in (0, plan.partition.groups):
                raise ValueError(
                    f"expected weights of {plan.partition.groups} groups, got {groups}"
                )
            layer = cls(plan, **about["built"])
            block = plan.params.sparsity_params.block_dimensions
            weights = []
            for group in range(groups):
                rows, columns, values = (tensors[f"{name} {group}"].numpy() for name in _PARTS)
                shape = (plan.sizes.x, plan.sizes.y)
                weights.append(COOMatrix(values, columns, rows, shape, block))
            if weights:
                layer.set_weights(weights[0] if groups == 1 else weights, None)
        except OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(file)}: {error}") from None
        return layer

    def _matrices(self) -> list[COOMatrix]:
        """The weights of each group; empty if no pattern is set."""
        encoded = self._encoded
        if encoded is None:
            return []
        if self.numerics:
            self._require_values()
            values = self.engine.read("values")
        else:
            values = np.zeros(self._partitioner.nz_size, self.plan.dtype.name)
        if isinstance(self._partitioner, DensePartitioner):
            return self._partitioner.matrices(encoded, values)
        decoded = self._partitioner.decode(self.engine.read("words"), values)
        groups = decoded if isinstance(decoded, list) else [decoded]
        return [o if isinstance(o, COOMatrix) else COOMatrix.from_pattern(*o) for o in groups]

    def set_pattern(self, pattern: Any) -> None:
        """Encode a pattern (for several groups, a sequence of them) and write its meta-info.

        Call `set_values` next: the values on the machine are in the places of the previous pattern.
        Without values, `grad_weight`, `scores` and `run` work.

        Raises:
            ValueError: another shape or block size than the plan's.
            BucketOverflowError: too many non-zeros for the buckets (a ValueError).
        """
        self._encoded = encoded = self._partitioner.encode_pattern(pattern)
        self._has_values = False
        self.engine.write("words", encoded.meta_info)

    def set_values(self, values: Any) -> None:
        """Write values [nnz] or [nnz, b, b] of the current pattern; of all groups, in their order.

        Raises:
            ValueError: values of another shape; no pattern is set.
        """
        self.engine.write("values", self._require_encoded().place(to_numpy(values)))
        self._has_values = True

    def set_weights(self, pattern: Any, values: Any) -> None:
        """Encode and write a pattern and its values; for several groups, sequences of both."""
        encoded = self._partitioner.encode(pattern, values)
        self._encoded = encoded.pattern
        self.engine.write("words", encoded.meta_info)
        if self.numerics:
            self.engine.write("values", encoded.nz_values)
        self._has_values = True

    @check_types
    def run(self, name: str) -> Profile:
        """Run a pass, "scores" or "rewire" on the data the machine holds."""
        self.profiles[name] = self.engine.run(name)
        return self.profiles[name]

    def forward(self, inputs: Any) -> np.ndarray:
        """Y = X W^T: [batch, in] to [batch, out], in the plan's type.

        Raises:
            ValueError: a pass that is not built; no pattern or no values are set.
        """
        self._require_pass("forward")
        self._require_values()
        self.engine.write("input", inputs)
        self.run("forward")
        return self.engine.read("forward result")

    def grad_input(self, gradient: Any) -> np.ndarray:
        """dX = dY W: [batch, out] to [batch, in]; raises what `forward` raises."""
        self._require_pass("grad_input")
        self._require_values()
        self.engine.write("gradient", gradient)
        self.run("grad_input")
        return self.engine.read("grad_input result")

    def grad_weight(self, gradient: Any, inputs: Any) -> np.ndarray:
        """dW = dY^T X at the pattern: [nnz] or [nnz, b, b], in the pattern's order.

        Needs no values; otherwise raises what `forward` raises.
        """
        self._require_pass("grad_weight")
        encoded = self._require_encoded()
        self.engine.write("gradient", gradient)
        self.engine.write("input", inputs)
        self.run("grad_weight")
        return encoded.gather(self.engine.read("grad_weight result"))

    def scores(self, gradient: Any, inputs: Any) -> np.ndarray:
        """Growth scores: magnitudes of the dense dW = dY^T X, pooled per block as the update says.

        Runs the program "scores": its profile lists the dense gradient in its pieces, the pooling,
        and the transfers to the host. `returned_values` has the values sent with the scores.

        Args:
            gradient, inputs: dY [batch, groups * out], X [batch, groups * in].

        Returns:
            float32 [out / rows, in / columns], with a leading axis for several groups. For single
            elements they are magnitudes; with "none" the host sums magnitudes over blocks.

        Raises:
            ValueError: a layer without `update`.
        """
        update = self._require_update()
        self.engine.write("gradient", gradient)
        self.engine.write("input", inputs)
        self.run("scores")
        scores = update.scores()
        return scores[0] if len(scores) == 1 else scores

    @property
    def returned_values(self) -> np.ndarray:
        """The values sent to the host with the last scores: [nnz] or [nnz, b, b]."""
        return self._require_values().gather(self._require_update().values())

    @property
    def returned_slots(self) -> list[np.ndarray]:
        """The optimizer state sent to the host with the last scores, each like the values."""
        return [self._require_encoded().gather(slot) for slot in self._require_update().slots()]

    def _require_encoded(self) -> EncodedPattern:
        """The encoded pattern; raises ValueError if none is set."""
        if self._encoded is None:
            raise ValueError("set a pattern first")
        return self._encoded

    def _require_values(self) -> EncodedPattern:
        """The encoded pattern; raises ValueError if none is set, or its values are not."""
        encoded = self._require_encoded()
        if self.numerics and not self._has_values:
            raise ValueError("the values of the new pattern are not set: call set_values first")
        return encoded

    def _require_pass(self, name: str) -> None:
        """Raise ValueError for a pass that is not built."""
        if name in self._built["passes"]:
            return
        planned = [known for known in PASSES if known in self.plan.costs]
        what, names = ("Layer", self._built["passes"]) if name in planned else ("plan", planned)
        raise ValueError(
            f"the {what.lower()} is for {', '.join(names) or 'no pass'}, not for {name}: pass "
            f"passes=... to popsparse.{what}"
        )

    def rewire(self, pattern: Any, values: Any, optimizer_slots: Sequence_[Any] = ()) -> Profile:
        """Send a new pattern, its values and optimizer state over the host link.

        Unlike `set_weights`, which costs nothing, this runs the program "rewire".

        Args:
            pattern, values: as for `set_weights`.
            optimizer_slots: one for each slot of the update, each like the values; empty sends
                zeros.

        Raises:
            ValueError: a layer without `update`, a wrong number of slots; as `set_weights`.
        """
        update = self._require_update()
        check_kind("optimizer_slots", optimizer_slots, (list, tuple), "a list like the values")
        count = update.update.optimizer_slots
        if len(optimizer_slots) not in (0, count):
            raise ValueError(f"expected {count} optimizer slots, got {len(optimizer_slots)}")
        encoded = self._partitioner.encode(pattern, values)
        slots = [self._partitioner.encode(pattern, slot).nz_values for slot in optimizer_slots]
        empty = [np.zeros_like(encoded.nz_values)] * (count - len(slots))
        update.send(encoded.meta_info, [encoded.nz_values, *slots, *empty])
        profile = self.run("rewire")
        self._encoded, self._has_values = encoded.pattern, True
        return profile

    def _require_update(self) -> UpdatePrograms:
        """The update programs; raises ValueError for a layer built without them."""
        if self._update is None:
            raise ValueError(
                "the layer has no programs for updates: build it with update=popsparse.Update()"
            )
        return self._update
