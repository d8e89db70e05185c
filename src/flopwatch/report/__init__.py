"""What a sweep found. `flopwatch.report.load(DIR)` gives it as a table; the command `flopwatch report` as a report."""

from flopwatch.report.table import COLUMNS, Column, Table, load

__all__ = ["COLUMNS", "Column", "Table", "load"]
