"""Reports of runs as one self-contained HTML page, and as plots for a paper."""

from phasetrain.runs.report.page import render_report
from phasetrain.runs.report.reading import RunReport, read_run
from phasetrain.runs.report.write import COMPARISON, FILE, write_report

__all__ = ["COMPARISON", "FILE", "RunReport", "read_run", "render_report", "write_report"]
