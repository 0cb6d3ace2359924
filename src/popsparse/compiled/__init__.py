"""Whole models on the tile machine: a training step as one program.

`trace` makes a graph of torch's operators of a step, `decompositions` replaces those that the
machine does not have, `lower` adds their steps to a program, and `model` runs it beside a host.
"""

from popsparse.compiled.model import CompiledModel, compile

__all__ = ["CompiledModel", "compile"]
