"""Writes the tables of settings, spellings and metrics into docs/monitoring.md.

python benchmarks/pages/monitor_tables.py
"""

import re
from pathlib import Path

from flopwatch.monitor.config import SPELLINGS, MonitorConfig
from flopwatch.records.metrics import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def settings_table() -> list[str]:
    fields = MonitorConfig.model_fields.items()
    rows = [f"| `{name}` | `{field.default!r}` | {field.description} |" for name, field in fields]
    return ["| setting | default | what it does |", "| --- | --- | --- |", *rows]


def spellings_table() -> list[str]:
    """Those of one section stand for the same ones in the others."""
    others = [path for path in SPELLINGS if not path.startswith(("flopwatch.", "monitor."))]
    rows = [f"| `{path}` | `{SPELLINGS[path]}` |" for path in others]
    return [
        "| spelling | setting |",
        "| --- | --- |",
        "| `monitor.freq.flops_profile_freq` | `flops_profile_freq` |",
        *rows,
    ]


def metrics_table() -> list[str]:
    rows = [
        f"| `{metric.key}` | {metric.unit} | {'basic' if metric.basic else ''} | {metric.description} |"
        for metric in METRICS.values()
    ]
    return ["| key | unit | | what it says |", "| --- | --- | --- | --- |", *rows]


TABLES = {"settings": settings_table, "spellings": spellings_table, "metrics": metrics_table}


def page_with_tables(text: str) -> str:
    """The page with every table made anew."""
    for name, table in TABLES.items():
        between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        content = "\n" + "\n".join(table()) + "\n\n"
        text, found = between.subn(lambda match, content=content: match[1] + content + match[2], text)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"{PAGE.name} has {found} places for the table {name!r}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
