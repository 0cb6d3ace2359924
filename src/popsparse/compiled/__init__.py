"""Whole models on the tile machine: a training step as one program.

`trace` records a step as a graph of torch operators, `decompositions` replaces those that the
machine does not support, `lower` adds their steps to a program, and `model` runs it from the host.
"""

from popsparse.compiled.model import CompiledModel, compile

__all__ = ["CompiledModel", "compile"]
