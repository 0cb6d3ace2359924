"""A wrong argument of any public callable raises a short one-line error that names it.

Each recipe is a valid call. One of its arguments is replaced by each value of `wrong.FIXED` and by
values drawn by hypothesis. The call may succeed or raise a ValueError, TypeError or RuntimeError;
anything else is a failure.
"""

from __future__ import annotations

import resource
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipes import public_callables
from recipes_blocks import RECIPES as BLOCKS
from recipes_core import RECIPES as CORE
from recipes_distributed import RECIPES as DISTRIBUTED
from recipes_files import RECIPES as FILES
from recipes_keras import RECIPES as KERAS
from recipes_machine import RECIPES as MACHINE
from recipes_nn import RECIPES as NN
from recipes_on_graphs import RECIPES as ON_GRAPHS
from recipes_onnx import NOT_INSTALLED
from recipes_onnx import RECIPES as ONNX
from recipes_popsparse import RECIPES as POPSPARSE
from recipes_programs import RECIPES as PROGRAMS
from recipes_training import RECIPES as TRAINING
from wrong import FIXED, anything, fault, refusal

RECIPES = CORE | NN | TRAINING | MACHINE | PROGRAMS | POPSPARSE | ON_GRAPHS | BLOCKS
RECIPES |= DISTRIBUTED | FILES | ONNX | KERAS


@pytest.fixture(autouse=True)
def _bounded(tmp_path, monkeypatch):
    """Limit memory to 1 GiB above the current mapping, so that huge sizes fail, and run in a
    temporary folder, where wrong paths are written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), before[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# What nobody calls to get something done: what programs are told with, or what they are given.
NOT_CALLED = {
    *(f"popsparse.machine.{name}Error" for name in ("Locality", "Machine", "Mapping", "Program")),
    *(f"popsparse.machine.{name}" for name in ("OutOfMemoryError", "RaceError", "Program")),
    *(f"popsparse.machine.{name}" for name in ("Tensor", "VertexView", "RaggedView", "Stream")),
    *(f"popsparse.machine.{name}" for name in ("Profile", "StepProfile")),
    *(f"popsparse.machine.{name}" for name in ("AbortError", "RemoteBuffer")),
    *(f"popsparse.{name}" for name in ("LayerEstimate", "ModelEstimate")),
    *(f"popsparse.{name}" for name in ("PassEstimate", "UpdateEstimate")),
    *(f"popsparse.machine.{name}" for name in ("Contents", "HeldVariable", "PlacedVertices")),
    "popsparse.machine.ProgramNode",
    *(f"popsparse.report.{name}" for name in ("ComparedPass", "Comparison", "Pair")),
    *(f"popsparse.report.{name}" for name in ("Finding", "Operation", "StoredProfile")),
    *(f"popsparse.{name}" for name in ("BucketOverflowError", "CompiledModel", "Encoded", "Plan")),
    *(f"popsparse.{name}" for name in ("EncodedPattern", "EncodingInfo", "Method")),
    *(f"popsparse.{name}" for name in ("PassTime", "PlannedTensor", "SparseTensor", "Triplets")),
    *(f"popsparse.block_sparse.{name}" for name in ("BlockSparsePlan", "MatmulParams")),
    *(f"dynsparse.training.{name}" for name in ("CheckpointError", "DropScore", "Schedule")),
    *(f"dynsparse.training.{name}" for name in ("GrowRequest", "RepairedBlock", "Survey")),
    "dynsparse.training.checkpoint.Saving",
    *(f"dynsparse.distributed.{name}" for name in ("SplitCols", "SplitHeads", "SplitRows")),
    *(f"dynsparse.training.records.{name}" for name in ("DeadUnits", "RecordError", "Records")),
    *(f"dynsparse.data.{name}" for name in ("DataSet", "LabelledImages")),
    "dynsparse.integrations.follower.Algorithm",
    "dynsparse.training.keep_memory",  # takes nothing, and would last to the end of this process
    *(f"dynsparse.selfcheck.{name}" for name in ("Check", "Result")),
}


def test_every_public_callable_has_a_recipe():
    known = set(RECIPES) | NOT_CALLED | NOT_INSTALLED
    assert not set(public_callables()) - known


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RECIPES)
def test_valid_call_succeeds(name):
    recipe = RECIPES[name]
    recipe.call(**recipe.make())


def _faults(name, wrong):
    recipe = RECIPES[name]
    faults = []
    for argument in recipe.make():
        arguments = None
        for what, make in wrong:
            arguments = arguments or recipe.make()
            error = refusal(recipe.call, arguments | {argument: make()})
            if error is None:
                arguments = None  # the call may have changed them
            told = error and fault(error, recipe.also)
            if told:
                faults.append(f"{argument} = {what}: {told}")
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_wrong_arguments_raise_a_one_line_error(name):
    _faults(name, FIXED.items())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drawn_arguments_raise_a_one_line_error(data):
    name = data.draw(st.sampled_from(sorted(RECIPES)))
    _faults(name, [data.draw(anything())])
