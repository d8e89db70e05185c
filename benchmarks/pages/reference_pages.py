"""Writes the tables that come from the code: metrics, settings, devices, ops and schemas.

python benchmarks/pages/reference_pages.py
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import flopwatch.flops.formulas  # noqa: F401  # registers the formulas
from flopwatch.automatic.watcher import ROWS, Rule, Seen
from flopwatch.flops.formulas.registry import _formulas
from flopwatch.hardware.peaks import Accelerator, load_accelerators
from flopwatch.monitor.config import MonitorConfig
from flopwatch.records.metrics import METRICS
from flopwatch.records.settings import SETTINGS
from flopwatch.spellings import MONITOR
from flopwatch.sweep.spec.matrix import Matrix
from pages.formula_texts import METRIC_FORMULAS, OP_FORMULAS
from pages.schemas import KINDS
from testbeds.unchanged.scripts import SCRIPTS

DOCS = Path(__file__).parents[2] / "docs"
_TYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
_VENDORS = {
    "nvidia": "NVIDIA",
    "amd": "AMD",
    "intel": "Intel",
    "apple": "Apple",
    "google": "Google",
    "aws": "AWS",
    "huawei": "Huawei",
}
_ENDINGS = re.compile(r"_(forward|fwd)$")


def settings_table() -> list[str]:
    fields = MonitorConfig.model_fields.items()
    rows = [(f"`{name}`", f"`{field.default!r}`", str(field.description)) for name, field in fields]
    return _table(("setting", "default", "what it does"), rows)


def spellings_table() -> list[str]:
    rows = [(f"`{path}`", f"`{setting}`") for path, setting in MONITOR.items()]
    return _table(("spelling", "setting"), rows)


def matrix_table() -> list[str]:
    columns = {name: each.column_name or name for name, each in SETTINGS.items() if each.column}
    rows = [
        (
            f"`{key}`",
            f"`{json.dumps(field.default)}`",
            str(field.description),
            f"`{columns[key]}`" if key in columns else "",
        )
        for key, field in Matrix.model_fields.items()
    ]
    return _table(("key", "default", "what it does", "column of the report"), rows)


def metrics_table() -> list[str]:
    if missing := METRICS.keys() ^ METRIC_FORMULAS.keys():
        raise ValueError(f"formula_texts.py and the metrics of the code differ: {sorted(missing)}")
    rows = [
        (f"`{key}`", metric.unit, "yes" if metric.basic else "", metric.description, METRIC_FORMULAS[key])
        for key, metric in METRICS.items()
    ]
    return _table(("key", "unit", "in every row", "what it says", "formula"), rows)


def devices_table() -> list[str]:
    lines: list[str] = []
    for vendor, title in _VENDORS.items():
        rows = [_device(record) for record in load_accelerators() if record.vendor == vendor]
        lines += [f"## {title}", "", *_table(("device", *_TYPES, "confidence", "source"), rows), ""]
    if {record.vendor for record in load_accelerators()} - _VENDORS.keys():
        raise ValueError("a vendor of the table has no heading in reference_pages.py")
    return lines[:-1]


def _device(record: Accelerator) -> tuple[str, ...]:
    peaks = [f"{record.peak_tflops[name]:g}" if name in record.peak_tflops else "" for name in _TYPES]
    return (record.name, *peaks, record.confidence, record.source)


def ops_table() -> list[str]:
    by_formula: dict[str, list[str]] = {}
    for op, function in _formulas.items():
        if not isinstance(function, partial):  # those are formulas that users have registered
            by_formula.setdefault(function.__name__, []).append(op)
    if missing := by_formula.keys() ^ OP_FORMULAS.keys():
        raise ValueError(f"formula_texts.py and the formulas of the code differ: {sorted(missing)}")
    rows = [(title, text, _op_names(by_formula[name])) for name, (title, text) in OP_FORMULAS.items()]
    return _table(("what", "FLOPs", "ops"), rows)


def schemas_table() -> list[str]:
    return _table(("schema", "describes"), [(f"`{name}.json`", written.where) for name, written in KINDS.items()])


def states_table() -> list[str]:
    head = "in the state", "when this happens", "what is done", "next state", "shown by"
    return _table(head, map(_row_of_states, ROWS))


def _row_of_states(row: Rule) -> tuple[str, ...]:
    """A row of the table of `flopwatch run`, in words."""
    states = "any" if len(row.states) == len(Seen) - 1 else ", *or* ".join(state.value for state in row.states)
    action = str(getattr(row.action, "func", row.action).__doc__)
    script = next((each.path for each in SCRIPTS if each.name == row.shown_by), "short.py")
    link = f"[{row.shown_by}](https://github.com/flopwatch/flopwatch/blob/main/testbeds/unchanged/{script})"
    return (
        states,
        ", *or* ".join(event.value for event in row.events),
        action,
        row.becomes.value if row.becomes else "",
        link,
    )


def _op_names(names: list[str]) -> str:
    """Names that differ only in `_forward` and `_fwd`, or in `_backward` and `_bwd`, are listed once."""
    plain = [_ENDINGS.sub("", name) if _ENDINGS.sub("", name) in names else name for name in names]
    plain = [
        name.replace("_bwd", "_backward") if name.replace("_bwd", "_backward") in names else name for name in plain
    ]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(plain))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]


TABLES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "numbers.md": {"metrics": metrics_table},
    "design.md": {"states": states_table},
    "reference/settings.md": {"settings": settings_table, "spellings": spellings_table, "matrix": matrix_table},
    "reference/devices.md": {"devices": devices_table},
    "reference/ops.md": {"ops": ops_table},
    "reference/files.md": {"schemas": schemas_table},
}


def with_tables(page: str, text: str) -> str:
    """The page's text with every table made anew."""
    for name, table in TABLES[page].items():
        between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        content = "\n" + "\n".join(table()) + "\n\n"
        text, found = between.subn(lambda match, content=content: match[1] + content + match[2], text)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"docs/{page} has {found} places for the table {name!r}")
    return text


if __name__ == "__main__":
    for page in TABLES:
        path = DOCS / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path}")
