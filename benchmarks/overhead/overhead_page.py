"""The cost tables in words: for the terminal, and as the generated section of docs/overhead.md."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from accuracy.rivals_venv import MONITOR_PINS, RIVAL_PINS
from overhead.contenders.tools import MONITORS, WAYS
from overhead.intervals import Interval
from overhead.results import CALL_BAR_SECONDS, OWN_TIME_BAR, CallTimes, Free, bare_step_seconds, overheads, side_effects
from overhead.results import free as free_figures

START = "<!-- table: python benchmarks/overhead/monitor_overhead.py -->"
END = "<!-- end -->"

Results = Mapping[str, Any]
"""Raw answers by part: `free`, `frequency` (by frequency), `rivals`, `harm` (by tool), `instructions`."""
Rows = list[list[str]]


def terminal_tables(results: Results) -> list[Table]:
    tables = []
    for title, rows in _tables(results):
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
        for index, heading in enumerate(rows[0]):
            table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows[1:]:
            table.add_row(*row)
        tables.append(table)
    return tables


def section(results: Results) -> str:
    """Everything between the markers."""
    parts = [_provenance(results)]
    for title, rows in _tables(results):
        parts += [f"### {title}", _markdown(rows)]
    parts += ["### How each was run", _how(results)]
    return "\n\n".join(parts)


def write_section(page: Path, text: str) -> None:
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{page} has no {START} ... {END} to write between")
    page.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}")


def percent(interval: Interval) -> str:
    return f"{_signed(interval.value)} % ({_signed(interval.low)} to {_signed(interval.high)})"


def _tables(results: Results) -> list[tuple[str, Rows]]:
    tables = []
    if "free" in results:
        tables.append(("Training with flopwatch against training without", _free_rows(free_figures(results["free"]))))
        tables.append(("One call of log_step on an ordinary step", _call_rows(results)))
    if "hybrid" in results:
        rows = _ratio_rows(free_figures(results["hybrid"]))
        tables.append(("Training in mode hybrid, with fake counters, against training without", rows))
    if "rivals" in results:
        tables.append(("Monitors as people use them", _monitor_rows(results)))
    if "frequency" in results:
        seconds = min(bare_step_seconds(raw) for raw in results["frequency"].values())
        tables.append(
            (f"Overhead by measuring frequency, on steps of {seconds * 1e3:.0f} ms", _frequency_rows(results))
        )
    return tables


def _ratio_rows(figures: Free) -> Rows:
    ratio = figures.ratio
    contains_one = "contains 1.000" if ratio.contains(1.0) else "does not contain 1.000"
    return [
        ["figure", "measured", "bar"],
        ["step time without the monitor, median", f"{figures.step_seconds * 1e3:.0f} ms", "about 200 ms"],
        [
            "step time with over without, ratio of medians",
            f"{ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f}), {contains_one}",
            "the interval contains 1.000",
        ],
    ]


def _free_rows(figures: Free) -> Rows:
    return [
        *_ratio_rows(figures),
        [
            "the monitor's own time per step",
            _of_step(figures, figures.own_seconds),
            f"{100 * OWN_TIME_BAR:.1f} %",
        ],
        ["the same in CPU time, without what others took in mid-call", _of_step(figures, figures.own_cpu_seconds), ""],
        ["of it CPU time of the sinks' threads", f"{figures.thread_seconds * 1e6:.0f} µs", ""],
        ["once, at the first step: counting FLOPs", f"{figures.count_seconds:.2f} s", "not in the above"],
        [
            "once, in the sinks' threads: CPU time to start",
            f"{figures.sinks_start_cpu_seconds:.2f} s",
            "not in the above",
        ],
        ["repeats x steps without and with", f"{figures.repeats} x {figures.steps}", "at least 10 repeats"],
    ]


def _of_step(figures: Free, seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs = {100 * figures.share(seconds):.3f} % of the step"


CALLS = {
    "mask_in_a_row": "`attention_mask=`, many calls in a row",
    "batch_in_a_row": "`batch=`, many calls in a row",
    "mask_in_the_loop": "`attention_mask=`, in the training loop",
    "batch_in_the_loop": "`batch=`, in the training loop",
}


def _call_rows(results: Results) -> Rows:
    calls = free_figures(results["free"]).calls
    counts = results.get("instructions", {})
    rows = [["given", "median", "p90", "p99", "instructions"]]
    for name, title in CALLS.items():
        count = counts.get({"mask_in_a_row": "attention_mask", "batch_in_a_row": "batch"}.get(name))
        rows.append([title, *_microseconds(calls[name]), f"{count:,.0f}" if count else ""])
    rows.append(["bar", f"{CALL_BAR_SECONDS * 1e6:.0f} µs", "", "", ""])
    return rows


def _microseconds(times: CallTimes) -> list[str]:
    return [f"{seconds * 1e6:.1f} µs" for seconds in (times.median, times.p90, times.p99)]


def _monitor_rows(results: Results) -> Rows:
    raws = list(results["rivals"].values())
    found = [overheads(raw) for raw in raws]
    steps = [f"longer steps, of {bare_step_seconds(raw) * 1e3:.0f} ms" for raw in raws]
    rows = [["monitor", *steps, "to the end of the first step", "what else it does"]]
    for tool in MONITORS:
        effects = "; ".join(side_effects(*results["harm"][tool.name])) if tool.name in results.get("harm", {}) else ""
        if tool.name in raws[-1]["failures"]:
            rows.append([tool.title, "did not run", "", "", effects or raws[-1]["failures"][tool.name]])
        else:
            start = f"{raws[-1]['start_seconds'][tool.name]:.1f} s"
            rows.append([tool.title, *(percent(by_tool[tool.name]) for by_tool in found), start, effects])
    return rows


def _frequency_rows(results: Results) -> Rows:
    by_frequency = {int(every): overheads(raw) for every, raw in results["frequency"].items()}
    rows = [["way", *(f"every {every}" if every > 1 else "every step" for every in by_frequency)]]
    tried = [way for way in WAYS if any(way.name in found for found in by_frequency.values())]
    rows += [
        [way.title, *(percent(found[way.name]) if way.name in found else "" for found in by_frequency.values())]
        for way in tried
    ]
    return rows


def _provenance(results: Results) -> str:
    rivals = {**MONITOR_PINS, **{name: RIVAL_PINS[name] for name in ("deepspeed", "mfu-tracker")}}
    pins = ", ".join(f"{name} {pin}" for name, pin in {"torch": version("torch"), **rivals}.items())
    loads = ", ".join(f"{load:.1f}" for load in results["load"])
    return (
        f"Measured on {results['date']} on {_processor()}, {os.cpu_count()} cores that others use too (load while "
        f"measuring {loads}), one thread for torch, with {pins}."
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _how(results: Results) -> str:
    """How the tools in the tables were run; flopwatch is in all of them."""
    monitors = MONITORS if "rivals" in results or "frequency" in results else MONITORS[:1]
    tools = [*monitors, *(WAYS if "frequency" in results else [])]
    by_title = {tool.title: tool.how for tool in tools if tool.how != "As above."}
    return "\n".join(f"- **{title}**: {how}" for title, how in by_title.items())


def _markdown(rows: Rows) -> str:
    head, *body = rows
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _signed(share: float) -> str:
    value = 100 * share
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:+.{digits}f}"
