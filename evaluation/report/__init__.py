"""Reports: one self-contained HTML file of an artifact, an evaluation, a benchmark, a difference or a comparison.

`write_report(kind, data, path)` is the door; docs/report.md describes the page.
"""

from .write import KINDS, available, draw_report, write_report
