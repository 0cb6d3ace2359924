"""The page about a product on the tile machine: plan, buckets, passes, tiles, timeline."""

from dynsparse.report.machine.encoding import encoding_data
from dynsparse.report.machine.layer import write_layer_report
from dynsparse.report.machine.report import report_html, write_report

__all__ = ["encoding_data", "report_html", "write_layer_report", "write_report"]
