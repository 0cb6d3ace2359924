"""Reports on runs of the tile machine: pages, text, findings, comparisons, profile files."""

from popsparse.report.buckets import encoding_data
from popsparse.report.comparison import (
    ComparedPass,
    Comparison,
    Pair,
    compare,
    comparison_text,
    profile_text,
)
from popsparse.report.data import (
    StoredProfile,
    load_profile,
    read_profiles,
    save_profile,
)
from popsparse.report.page import layer_page, report_html, write_layer_report, write_report
from popsparse.report.rules import Finding, findings
from popsparse.report.steps import Operation, memory_steps, operations, peak_step

__all__ = [
    "ComparedPass",
    "Comparison",
    "Finding",
    "Operation",
    "Pair",
    "StoredProfile",
    "compare",
    "comparison_text",
    "encoding_data",
    "findings",
    "layer_page",
    "load_profile",
    "memory_steps",
    "operations",
    "peak_step",
    "profile_text",
    "read_profiles",
    "report_html",
    "save_profile",
    "write_layer_report",
    "write_report",
]
