"""Runs of the tile machine for people: pages, text, findings, comparisons, profiles in files."""

from dynsparse.report.machine.by_operation import Operation, operations
from dynsparse.report.machine.comparison import ComparedPass, Comparison, Pair, compare
from dynsparse.report.machine.contents import ContentsData
from dynsparse.report.machine.data import ProfileData, StepData, Tiles, read_profiles
from dynsparse.report.machine.encoding import encoding_data
from dynsparse.report.machine.layer import layer_page, write_layer_report
from dynsparse.report.machine.memory import memory_steps, peak_step
from dynsparse.report.machine.report import report_html, write_report
from dynsparse.report.machine.rules import Finding, findings
from dynsparse.report.machine.stored import StoredProfile, load_profile, save_profile
from dynsparse.report.machine.text import comparison_text, profile_text

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
