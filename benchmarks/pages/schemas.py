"""Writes the JSON Schemas of flopwatch's files and of its `--json` outputs, from the dataclasses that they are made of.

python benchmarks/pages/schemas.py
"""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import NotRequired, TypedDict

from flopwatch.cli.doctor.examine import CheckResult, Examined
from flopwatch.records.flops import ConventionFlops, FlopCount, Peak
from flopwatch.records.run import Notice, PartialRow, Provenance, Row, RunStart, Summary
from flopwatch.records.trial import TrialResult
from flopwatch.report.records import SweepSummary
from flopwatch.report.run.contents import Curve, RunReport
from flopwatch.runs.advice import RunVerdict, TimeUse
from flopwatch.runs.comparison import Comparison
from flopwatch.runs.counters import Counters
from flopwatch.runs.explain import Explanation
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.waterfall import Loss
from flopwatch.sweep.fit import Found

SCHEMAS = Path(__file__).parents[2] / "src" / "flopwatch" / "schemas"

Logged = float | Literal["nan", "inf", "-inf"]
Format = Literal[1]


class Peaks(TypedDict):
    """The peak of a device for each compute type."""

    peaks: list[Peak]


class CountedStep(TypedDict):
    """MFU and HFU of a step of the given time."""

    seconds: float
    mfu: float
    hfu: float
    peak: Peak
    mfu_by_convention: NotRequired[float]


class Flops(TypedDict):
    """The FLOPs of one training step of a model."""

    model: str
    parameters: int
    trainable_parameters: int
    batch_size: int
    seq_len: int
    flops: FlopCount
    step: NotRequired[CountedStep]
    convention: NotRequired[ConventionFlops]


class Why(TypedDict):
    """What costs a run most.

    Attributes:
        verdict: None if the log does not show it; `no_verdict` then says why.
        largest: Keys of the largest losses, or of the longest uses of the time if the MFU is unknown.
        losses: From 100 % of the peak down to the MFU of the run; empty if the MFU is unknown.
        counters: What hardware counters have shown, only if the run has read some.
        uses: The uses of the wall time, only if the MFU is unknown. So are the rates.
    """

    log: str
    steps: int | None
    exact: bool | None
    verdict: RunVerdict | None
    no_verdict: str | None
    largest: list[str]
    wall_seconds: float
    mfu_percent: float | None
    step_mfu_percent: float | None
    losses: list[Loss]
    traces: list[TraceSplit]
    notes: list[str]
    counters: NotRequired[Counters]
    uses: NotRequired[list[TimeUse]]
    tokens_per_second: NotRequired[float | None]
    samples_per_second: NotRequired[float | None]
    flops_per_second: NotRequired[float | None]


class Traces(TypedDict):
    """How the time of traced steps was spent."""

    traces: list[TraceSplit]


class GpuChecks(TypedDict):
    """What the checks of an accelerator have found.

    Attributes:
        is_complete: False if the checks were ended before the last one.
        device: What torch reports about the accelerator.
    """

    format: Format
    kind: Literal["flopwatch doctor --gpu"]
    is_complete: bool
    versions: Mapping[str, str]
    device: Mapping[str, Any]
    checks: list[CheckResult]


class NewestValue(TypedDict):
    """The newest value of a metric, and the last step of its window."""

    value: float | None
    step: int


def _as_written(kind: type, name: str = "", left_out: tuple[str, ...] = (), **changed: Any) -> Any:
    """The type of the JSON object of a record that is not written field by field."""
    types = get_type_hints(kind)
    members = {field.name: types[field.name] for field in fields(kind) if field.name not in left_out} | changed
    written = TypedDict(name or kind.__name__, members)  # type: ignore[misc]
    written.__doc__ = kind.__doc__
    return written


_SAID: Any = NotRequired[
    Annotated[
        Mapping[str, list[Any]],
        Field(description="By texts that flopwatch has said: the template and the values in it. May be absent."),
    ]
]
_COLUMNS = Mapping[str, list[bool | Logged | None]]
_SOMETIMES = {
    "all_ranks": NotRequired[Mapping[str, int]],
    "exact": NotRequired[bool],
    "peak": NotRequired[Mapping[str, Any] | None],
    "notes": NotRequired[list[str]],
    "counters_source": NotRequired[str],
    "said": _SAID,
}
_ROW: Mapping[str, Any] = {"values": Mapping[str, Logged], "steps": _COLUMNS, **_SOMETIMES}
_LOG_LINE: Any = Annotated[
    RunStart
    | _as_written(Provenance, said=_SAID)
    | _as_written(Row, left_out=("skip",), **_ROW)
    | _as_written(PartialRow, left_out=("skip",), **{**_ROW, "type": Literal["partial_row"]})
    | _as_written(Notice, doubted=NotRequired[list[tuple[int, int]]], said=_SAID)
    | _as_written(Summary, values=Mapping[str, Logged], said=_SAID),
    Field(discriminator="type"),
]


class Written(NamedTuple):
    """A kind of JSON that flopwatch writes."""

    where: str
    type: Any


KINDS: Mapping[str, Written] = {
    "run_log": Written("a line of a run's `training_log.jsonl`", _LOG_LINE),
    "trial_result": Written(
        "a line of a sweep's `results.jsonl`, a trial's `result.json`, and `flopwatch trial --json`", TrialResult
    ),
    "flops": Written("`flopwatch flops --json`", Flops),
    "peak": Written("`flopwatch peak --json`", Peaks),
    "explain": Written("`flopwatch explain --json`", Explanation),
    "why": Written("`flopwatch why --json`", Why),
    "trace": Written("`flopwatch trace --json`", Traces),
    "compare_runs": Written("`flopwatch compare --json` of two runs", Comparison),
    "report_run": Written(
        "`flopwatch report --json` of a run",
        _as_written(
            RunReport,
            format=Format,
            curves=list[Curve],
            values=Mapping[str, NewestValue],
            means=Mapping[str, float | None],
        ),
    ),
    "report_sweep": Written(
        "`flopwatch report --json` of a sweep",
        _as_written(SweepSummary, left_out=("rows",), trials=get_type_hints(SweepSummary)["rows"], format=Format),
    ),
    "fit": Written("`flopwatch fit --json`", _as_written(Found, folder=str)),
    "doctor": Written("`flopwatch doctor --json`", _as_written(Examined, is_working=bool)),
    "doctor_gpu": Written("the file of `flopwatch doctor --gpu`", GpuChecks),
}


class _AllWritten(GenerateJsonSchema):
    """A field of a dataclass is in every file, even if it has its default."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return field["type"] == "dataclass-field" or super().field_is_required(field, total)


def schema_text(name: str) -> str:
    """The JSON Schema of a kind, as its file holds it."""
    written = KINDS[name]
    content = TypeAdapter(written.type).json_schema(mode="serialization", schema_generator=_AllWritten)
    for part in (content, *content.get("$defs", {}).values()):
        _describe(part)
    content.pop("discriminator", None)  # of OpenAPI, not of JSON Schema
    about = {"description": content["description"]} if "description" in content else {}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"flopwatch: {written.where.replace('`', '')}",
        **about,
    }
    return _laid_out({**head, **{key: value for key, value in content.items() if key not in head}}) + "\n"


def _laid_out(value: Any, indent: str = "") -> str:
    """JSON in which whatever fits into a line stands on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent + line) <= 120 or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + "  "
    if isinstance(value, list):
        inside = [_laid_out(item, deeper) for item in value]
    else:
        inside = [f"{json.dumps(name)}: {_laid_out(item, deeper)}" for name, item in value.items()]
    return f"{line[0]}\n{deeper}" + f",\n{deeper}".join(inside) + f"\n{indent}{line[-1]}"


def _describe(part: dict[str, Any]) -> None:
    """Move what a docstring says about each field to that field, and drop titles and defaults that pydantic added."""
    text, _, attributes = inspect.cleandoc(part.get("description", "")).partition("Attributes:\n")
    said = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE))
    for name, value in part.get("properties", {}).items():
        for noise in ("title", "default"):
            value.pop(noise, None)
        if name in said:
            value["description"] = _as_json_says(said[name])
    if "description" in part:
        part["description"] = _as_json_says(text)
    part.pop("title", None)


def _as_json_says(text: str) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    return re.sub(r"\b(None|True|False)\b", lambda found: words[found[0]], " ".join(text.split()))


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for name in KINDS:
        (SCHEMAS / f"{name}.json").write_text(schema_text(name), encoding="utf-8")
        print(f"wrote {SCHEMAS / name}.json")
