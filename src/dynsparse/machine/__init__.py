"""The tile machine: a model of a bulk-synchronous processor with private memories."""

from dynsparse.machine.target import Target

__all__ = ["Target"]
