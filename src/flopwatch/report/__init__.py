"""What a sweep found. `flopwatch.report.load(DIR)` gives it as a table; the command `flopwatch report` as a report."""

from flopwatch.report.table import Table, load
from flopwatch.report.table_columns import COLUMNS, Column

__all__ = ["COLUMNS", "Column", "Table", "load"]
