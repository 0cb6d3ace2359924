"""What can be wrong with a program for the tile machine. Every message is one line."""

from __future__ import annotations


class MachineError(ValueError):
    """A graph or program that the machine cannot run."""


class MappingError(MachineError):
    """An element without a tile, or a tile that does not exist."""


class LocalityError(MachineError):
    """A vertex connected to memory of another tile."""


class RaceError(MachineError):
    """Two vertices of one compute set, or two parts of one copy, that meet in one element."""


class ProgramError(MachineError):
    """A program that is put together wrongly, or that does not end."""


class AbortError(MachineError):
    """A program that ends itself, by `Abort`, `AbortOnCondition` or `ErrorProgram`."""


class OutOfMemoryError(MachineError):
    """A tile whose variables, code and vertex state do not fit."""
