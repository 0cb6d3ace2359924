"""Does this installation compute rightly on this machine, and how fast is the machine?

What `dynsparse check` does: every kernel that can run here beside float64, threads, GPUs, the
memory and the exchange of the tile machine; and what is reached in arithmetic and in memory.
"""

from dynsparse.selfcheck.result import Check, Result, Speed
from dynsparse.selfcheck.run import run_checks

__all__ = ["Check", "Result", "Speed", "run_checks"]
