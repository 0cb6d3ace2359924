"""Measures what the kernels cost on this processor, and fits the constants that choose among them.

`cells.py` says which layers are measured and times them, `fit.py` makes constants of times,
`run.py` does both and keeps what it finds for the processes to come.
"""

from dynsparse.ops.linear.tuning.run import conclude, tune

__all__ = ["conclude", "tune"]
