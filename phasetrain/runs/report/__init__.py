"""Reports of runs: what came out, as one HTML page that needs nothing but itself, and as plots for
a paper."""

from phasetrain.runs.report.page import page
from phasetrain.runs.report.reading import RunReport, read_run
from phasetrain.runs.report.write import COMPARISON, FILE, write_report

__all__ = ["COMPARISON", "FILE", "RunReport", "page", "read_run", "write_report"]
