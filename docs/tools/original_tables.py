"""The page docs/coming-from-popsparse.md: names of Graphcore's software beside those here.

    python docs/tools/original_tables.py docs/coming-from-popsparse.md

replaces the text between `<!-- original: NAME -->` and `<!-- /original -->`: for a program by its
flags, from the table that the commands read; "options", "functions" and "tools" are lists in this
file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dynsparse.cli.original import PROGRAMS, Answer
from popsparse.planning.options import to_option_name

_MARKED = re.compile(r"(<!-- original: ([\w.-]+) -->\n).*?(<!-- /original)", re.S)

OPTIONS = [
    "availableMemoryProportion",
    "metaInfoBucketOversizeProportion",
    "doGradAPass",
    "doGradWPass",
    "partialsType",
    "sharedBuckets",
    "enableStructuredRearrangements",
    "planConstraints",
    "partitioner.optimiseForSpeed",
    "partitioner.forceBucketSpills",
    "partitioner.useActualWorkerSplitCosts",
    "numBands",
    "nSplit",
    "enablePreprocessing",
    "numberOfPass",
    "memoryCycleRatio",
    "partitionMethod",
]

FUNCTIONS = {
    "SparsityParams": "popsparse.SparsityParams",
    "FullyConnectedParams::createWithNzRatio": (
        "popsparse.FullyConnectedParams.create_with_nz_ratio"
    ),
    "FullyConnectedParams::createWithNumNonZeroValues": (
        "popsparse.FullyConnectedParams.create_with_num_non_zero_values"
    ),
    "MatMulParams": "popsparse.MatmulParams",
    "SparseTensor": "popsparse.SparseTensor",
    "PlanningCache": "popsparse.PlanningCache",
    "createFullyConnectedWeights": "popsparse.create_fully_connected_weights",
    "createFullyConnectedInput": "popsparse.create_fully_connected_input",
    "fullyConnectedFwd": "popsparse.fully_connected_forward",
    "fullyConnectedGradA": "popsparse.fully_connected_grad_a",
    "fullyConnectedSparseGradW": "popsparse.fully_connected_grad_w",
    "fullyConnectedDenseGradWSerialSplits": "popsparse.fully_connected_dense_grad_w_serial_splits",
    "createSparseDenseMatMulLHS": "popsparse.create_sparse_dense_matmul_lhs",
    "createSparseDenseMatMulRHS": "popsparse.create_sparse_dense_matmul_rhs",
    "sparseDenseMatMul": "popsparse.sparse_dense_matmul",
    "createIndicesTensor": "popsparse.create_indices_tensor",
    "createSliceTensor": "popsparse.create_slice_tensor",
    "embeddingSlice": "popsparse.embedding_slice",
    "embeddingUpdateAdd": "popsparse.embedding_update_add",
    "Partitioner::createSparsityDataImpl": "popsparse.Partitioner.encode",
    "Partitioner::sparsityDataImplToCOOMatrix": "popsparse.Partitioner.decode",
    "COOMatrix": "popsparse.COOMatrix",
    "CSRMatrix": "popsparse.CSRMatrix",
    "CSCMatrix": "popsparse.CSCMatrix",
    "static_::createSparseDenseMatMulLHS": "popsparse.static.create_sparse_dense_matmul_lhs",
    "static_::sparseDenseMatMul": "popsparse.static.sparse_dense_matmul",
    "static_::denseSparseMatMul": "popsparse.static.dense_sparse_matmul",
    "static_::Partitioner": "popsparse.static.Partitioner",
    "BSMatMulParams, bsMatMul": "popsparse.block_sparse",
    "representation_from_triplets": "popsparse.Partitioner.encode",
    "triplets_from_representation": "popsparse.Partitioner.decode",
    "Triplets": "popsparse.Triplets",
    "triplets_from_dense": "popsparse.triplets_from_dense",
    "dense_from_triplets": "popsparse.dense_from_triplets",
    "mask_from_triplets": "popsparse.mask_from_triplets",
    "values_at_indices, blocks_at_indices": "dynsparse.SparsePattern.values_of",
    "random_indices": "dynsparse.SparsePattern.random",
    "SparseFcLayer.from_triplets": "popsparse.SparseFcLayer.from_triplets",
    "SparseFcLayer.from_random_generator": "popsparse.SparseFcLayer.from_random_generator",
    "SparseFcLayer.update_triplets": "popsparse.SparseFcLayer.update_triplets",
    "SparseFcLayer.get_triplets": "popsparse.SparseFcLayer.get_triplets",
    "SparseFcLayer.extract_dense": "popsparse.SparseFcLayer.extract_dense",
    "SparseFcLayer.extract_mask": "popsparse.SparseFcLayer.extract_mask",
    "SparseFcLayer.extract_slot_triplets": "popsparse.SparseFcLayer.extract_slot_triplets",
    "SparseFcLayer.update_slots_from_triplets": (
        "popsparse.SparseFcLayer.update_slots_from_triplets"
    ),
    "SparseFcLayer.get_dense_grad_w": "popsparse.Layer.scores",
    "DenseFcLayer": "torch.nn.Linear",
    "SparseTiedEmbedding": "dynsparse.nn.TiedEmbedding",
    "prune_and_grow, regrow_rigl": "dynsparse.RigL",
}
"""Names in C++ or Python; commas separate several that have one counterpart here."""

_NOTHING = "nothing: there is no device"
TOOLS = {
    "gc-info": "`dynsparse info` for the CPU; `popsparse.machine.Target` has the machine's figures",
    "gc-inventory": "`dynsparse info --json`",
    "gc-monitor": _NOTHING + ", `top` shows the process",
    "gc-flops": "`dynsparse bench`",
    "gc-memorytest": _NOTHING,
    "gc-exchangetest, gc-exchangewritetest": (
        "`dynsparse check` compares products on the CPU with float64, "
        "`dynsparse matmul` those on the machine"
    ),
    "gc-hosttraffictest": (
        "`host_read_bytes_per_second`, `remote_read_bytes_per_second`, and the same with write, of "
        "`popsparse.machine.Target`"
    ),
    "gc-hostsynclatencytest": "`sync_cycles` of `popsparse.machine.Target`",
    "gc-iputraffictest": (
        "`link_bytes_per_second` and `link_sync_cycles` of `popsparse.machine.Target`"
    ),
    "gc-links, gc-gwlinkstraffictest": "nothing: the topology of the links is not modelled",
    "gc-powertest": "nothing: power is not modelled",
    "gc-reset": _NOTHING,
    "gc-docker, gc-podman": _NOTHING + ", any container runs it",
    "popc": "a codelet is a Python function: `popsparse.machine.Codelet`",
    "PopVision Graph Analyser": "`dynsparse report`",
    "PopVision System Analyser": "`dynsparse.tracing`, whose traces Perfetto and Chrome open",
}
"""The command-line tools; an entry in code is a command or an attribute here."""


def _cell(answer: Answer) -> str:
    if isinstance(answer, dict):
        return "; ".join(f"{value}: {_cell(what)}" for value, what in answer.items())
    if not answer:
        return "always so, taken"
    if answer.startswith("--"):
        answer = answer.replace("{1-}", "1 - value").replace("{}", "value")
        return f"`{answer.replace('{,}', 'values').replace('=', ' ')}`"
    return answer


def _table(rows: list[str], head: str = "there") -> str:
    return "\n".join([f"| {head} | here |", "|---|---|", *rows])


def render(name: str) -> str:
    """Markdown of a program's flags, of the options, of the functions or of the tools.

    Raises:
        ValueError: an unknown name.
    """
    if name == "options":
        rows = [f"| `{original}` | `{to_option_name(original)}` |" for original in OPTIONS]
        return _table(rows)
    if name == "functions":
        rows = [
            f"| {', '.join(f'`{one}`' for one in original.split(', '))} | `{ours}` |"
            for original, ours in FUNCTIONS.items()
        ]
        return _table(rows)
    if name == "tools":
        rows = [
            f"| {', '.join(f'`{tool}`' for tool in original.split(', '))} | {answer} |"
            for original, answer in TOOLS.items()
        ]
        return _table(rows)
    if name not in PROGRAMS:
        expected = f"options, functions, tools or one of {', '.join(PROGRAMS)}"
        raise ValueError(f"expected {expected}: {name!r}")
    program = PROGRAMS[name]
    same = ", ".join(f"`{one}`" for one in sorted(program.same))
    text = f"`{name}` is `dynsparse {program.command}`. The same there and here: {same}."
    if not program.changed:
        return text
    rows = [f"| `{flag}` | {_cell(answer)} |" for flag, answer in sorted(program.changed.items())]
    return f"{text}\n\n{_table(rows, 'flag')}"


def fill(text: str) -> str:
    """The page with all its marked parts regenerated."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{render(match[2])}\n\n{match[3]}", text)


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(fill(file.read_text()))
