"""The tile machine: a model of a bulk-synchronous processor with private memories.

Build a `Graph` of variables and vertices for a `Target`, put `Program`s together, and run them with
an `Engine`: it gives the numbers and, as a `Profile`, the cycles, bytes and memory of each step.
"""

from dynsparse.machine import codelets
from dynsparse.machine.contents import Contents, HeldVariable, PlacedVertices
from dynsparse.machine.dtypes import (
    BOOL,
    FLOAT,
    HALF,
    INT,
    SHORT,
    UNSIGNED_CHAR,
    UNSIGNED_INT,
    UNSIGNED_SHORT,
    DType,
    as_dtype,
)
from dynsparse.machine.engine import Engine
from dynsparse.machine.errors import (
    AbortError,
    LocalityError,
    MachineError,
    MappingError,
    OutOfMemoryError,
    ProgramError,
    RaceError,
)
from dynsparse.machine.graph import Graph
from dynsparse.machine.objects import ComputeSet, RemoteBuffer, Stream
from dynsparse.machine.options import EngineOptions
from dynsparse.machine.profile import Profile, StepProfile
from dynsparse.machine.program import (
    Abort,
    AbortOnCondition,
    Call,
    Copy,
    CrossReplicaCopy,
    ErrorProgram,
    Execute,
    If,
    PrintTensor,
    Program,
    Repeat,
    RepeatWhileFalse,
    RepeatWhileTrue,
    Sequence,
    Switch,
    Sync,
    WriteUndef,
)
from dynsparse.machine.target import Target
from dynsparse.machine.tensor import Tensor, concat, rotation
from dynsparse.machine.tree import ProgramNode
from dynsparse.machine.vertex import Codelet, In, InOut, Out, Ragged, RaggedView, VertexView

__all__ = [
    "BOOL",
    "FLOAT",
    "HALF",
    "INT",
    "SHORT",
    "UNSIGNED_CHAR",
    "UNSIGNED_INT",
    "UNSIGNED_SHORT",
    "Abort",
    "AbortError",
    "AbortOnCondition",
    "Call",
    "Codelet",
    "ComputeSet",
    "Contents",
    "Copy",
    "CrossReplicaCopy",
    "DType",
    "Engine",
    "EngineOptions",
    "ErrorProgram",
    "Execute",
    "Graph",
    "HeldVariable",
    "If",
    "In",
    "InOut",
    "LocalityError",
    "MachineError",
    "MappingError",
    "Out",
    "OutOfMemoryError",
    "PlacedVertices",
    "PrintTensor",
    "Profile",
    "Program",
    "ProgramError",
    "ProgramNode",
    "RaceError",
    "Ragged",
    "RaggedView",
    "RemoteBuffer",
    "Repeat",
    "RepeatWhileFalse",
    "RepeatWhileTrue",
    "Sequence",
    "StepProfile",
    "Stream",
    "Switch",
    "Sync",
    "Target",
    "Tensor",
    "VertexView",
    "WriteUndef",
    "as_dtype",
    "codelets",
    "concat",
    "rotation",
]
