"""The tile machine: a model of a bulk-synchronous processor with private memories.

Build a `Graph` of variables and vertices for a `Target`, put `Program`s together, and run them with
an `Engine`: it gives the numbers and, as a `Profile`, the cycles, bytes and memory of each step.
"""

from popsparse.machine import codelets
from popsparse.machine.dtypes import (
    BOOL,
    FLOAT,
    HALF,
    INT,
    SHORT,
    UNSIGNED_CHAR,
    UNSIGNED_INT,
    UNSIGNED_SHORT,
    AbortError,
    DType,
    LocalityError,
    MachineError,
    MappingError,
    OutOfMemoryError,
    ProgramError,
    RaceError,
    as_dtype,
)
from popsparse.machine.engine import Engine, EngineOptions
from popsparse.machine.graph import Graph
from popsparse.machine.memory import Contents, HeldVariable, PlacedVertices
from popsparse.machine.objects import ComputeSet, RemoteBuffer, Stream
from popsparse.machine.profile import Profile, ProgramNode, StepProfile
from popsparse.machine.program import (
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
from popsparse.machine.target import Target
from popsparse.machine.tensor import Tensor, concat, rotation
from popsparse.machine.vertex import Codelet, In, InOut, Out, Ragged, RaggedView, VertexView

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
