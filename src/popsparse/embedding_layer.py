"""A sparse table on the tile machine, ready to run: rows looked up, and the gradient of its values.

The short way through `embedding_slice` and `embedding_update_add`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynsparse.checks import check_integer
from dynsparse.typed import typed
from popsparse.embedding import (
    create_indices_tensor,
    create_slice_tensor,
    embedding_slice,
    embedding_update_add,
)
from popsparse.encoding.block_lists import to_numpy
from popsparse.encoding.encoded import EncodedPattern
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine import Engine, Execute, Graph, Profile, Sequence, codelets
from popsparse.planning.plan import Plan
from popsparse.programs.weights import SparseTensor


class EmbeddingLayer:
    """A table [entries, size] of one plan, looked up for so many indices at a time.

    Args:
        plan: as of a layer with as many outputs as entries; for the gradient with `do_grad_w_pass`.
        num_indices: of each call.

    Attributes:
        profiles: of the last run of "slice" and "gradient".

    Raises:
        OutOfMemoryError: a tile that does not fit.
        ValueError: a plan of dense weights or of several groups.
    """

    @typed
    def __init__(self, plan: Plan, num_indices: int) -> None:
        self.plan, self.num_indices = plan, check_integer("num_indices", num_indices, 1)
        self.profiles: dict[str, Profile] = {}
        self._encoded: EncodedPattern | None = None
        self._partitioner = Partitioner(plan)
        graph = Graph(plan.target)
        settings = plan.params, plan.options
        weights = SparseTensor.create(graph, plan, "table")
        indices = create_indices_tensor(graph, plan.params, self.num_indices)
        look_up = Sequence()
        rows = embedding_slice(graph, weights, indices, look_up, *settings)
        graph.add_handle("rows", rows)
        programs = {"slice": look_up}
        if plan.options.do_grad_w_pass:
            programs["gradient"] = self._gradient(graph, weights, indices)
        graph.add_handle("words", weights.meta_info)
        graph.add_handle("values", weights.nz_values)
        graph.add_handle("indices", indices)
        self.engine = Engine(graph, programs)

    def _gradient(self, graph: Graph, weights: SparseTensor, indices: Any) -> Sequence:
        """Rows added into zeros that lie as the values do."""
        plan = self.plan
        tiles = graph.tiles_of(weights.values)[..., 0]
        values = graph.add_variable(
            weights.values.dtype, weights.values.shape, "gradient of table", tiles=tiles
        )
        parts = weights.plan, weights.meta_info, values.flatten(), weights.overflow
        gradient = SparseTensor(*parts, weights.words, values)
        slices = create_slice_tensor(
            graph, plan.dtype, plan.params, self.num_indices, plan.options, name="gradient of rows"
        )
        program = Sequence()
        zero = graph.add_compute_set("zero gradient")
        graph.add_vertices(zero, codelets.FILL, tiles, {"out": values, "value": 0})
        program.add(Execute(zero))
        settings = plan.params, plan.options
        embedding_update_add(graph, gradient, slices, indices, 1.0, program, *settings)
        graph.add_handle("gradient of rows", slices)
        graph.add_handle("gradient", gradient.nz_values)
        return program

    def set_weights(self, pattern: Any, values: Any) -> None:
        """Encode a pattern and its values, and write them; errors as of `Layer.set_weights`."""
        encoded = self._partitioner.encode(pattern, values)
        self._encoded = encoded.pattern
        self.engine.write("words", encoded.meta_info)
        self.engine.write("values", encoded.nz_values)

    def set_values(self, values: Any) -> None:
        """Write values of the pattern that was set."""
        self.engine.write("values", self._held().place(to_numpy(values)))

    def slice(self, indices: Any) -> np.ndarray:
        """The rows of the table at `indices` [num_indices]: [num_indices, size]."""
        self._held()
        self.engine.write("indices", indices)
        self.profiles["slice"] = self.engine.run("slice")
        return self.engine.read("rows")

    def gradient(self, indices: Any, rows: Any) -> np.ndarray:
        """Rows [num_indices, size] added up where the pattern has values: [nnz] or [nnz, b, b]."""
        self._held()
        self.engine.write("indices", indices)
        self.engine.write("gradient of rows", rows)
        self.profiles["gradient"] = self.engine.run("gradient")
        return self._held().gather(self.engine.read("gradient"))

    def _held(self) -> EncodedPattern:
        if self._encoded is None:
            raise ValueError("set a pattern first")
        return self._encoded
