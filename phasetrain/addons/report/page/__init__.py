"""Reports of runs as one self-contained HTML page, and as plots for a paper."""

from phasetrain.addons.report.page.page import render_report
from phasetrain.addons.report.page.reading import RunReport, read_run
from phasetrain.addons.report.page.write import COMPARISON, REPORT_FILE, write_report

__all__ = ["COMPARISON", "REPORT_FILE", "RunReport", "read_run", "render_report", "write_report"]
