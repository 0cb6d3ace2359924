"""Plots of patterns and records, and tables of benchmark results."""

from dynsparse.report.training.plot import plot

__all__ = ["plot"]
