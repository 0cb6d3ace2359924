"""Pictures of patterns and records, tables and pages of benchmarks."""

from dynsparse.report.training.plot import plot

__all__ = ["plot"]
