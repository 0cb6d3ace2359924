"""Runs of the tile machine for people: pages, text, findings, comparisons, profiles in files."""

from popsparse.report.by_operation import Operation, operations
from popsparse.report.comparison import ComparedPass, Comparison, Pair, compare
from popsparse.report.contents import ContentsData
from popsparse.report.data import ProfileData, StepData, Tiles, read_profiles
from popsparse.report.encoding import encoding_data
from popsparse.report.layer import layer_page, write_layer_report
from popsparse.report.memory import memory_steps, peak_step
from popsparse.report.report import report_html, write_report
from popsparse.report.rules import Finding, findings
from popsparse.report.stored import StoredProfile, load_profile, save_profile
from popsparse.report.text import comparison_text, profile_text

__all__ = [
    "ComparedPass",
    "Comparison",
    "ContentsData",
    "Finding",
    "Operation",
    "Pair",
    "ProfileData",
    "StepData",
    "StoredProfile",
    "Tiles",
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
