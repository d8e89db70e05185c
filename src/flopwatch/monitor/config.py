"""The monitor's configuration: typed, with defaults, from a YAML file or a dict."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flopwatch.errors import InputError
from flopwatch.records.flops import AttentionConvention
from flopwatch.spellings import MONITOR, SECTIONS
from flopwatch.text import first_line

ModeName = Literal["smart", "estimate", "profiler", "hybrid"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "production": {"mode": "smart", "flops_profile_freq": 500, "recalibration_frequency": 1000},
    "research": {"mode": "profiler", "flops_profile_freq": 50},
    "prototype": {"mode": "estimate", "flops_profile_freq": 0},
    "complex": {"mode": "hybrid"},
}
"""Settings for four common purposes, as recommended in docs/requirements.md."""


class MonitorConfig(BaseModel):
    """All settings of the monitor. `docs/monitoring.md` lists the other names that a configuration file can use."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    mode: ModeName = Field("smart", description="How FLOPs are found.")
    count: Literal["auto", "every"] = Field(
        "auto", description="every: count every step as it runs, which makes each of them slower."
    )
    attention: AttentionConvention = Field(
        "full", description="causal: pairs of positions that are masked do not count."
    )
    log_every: int = Field(50, ge=1, description="Steps per logging window: each window is one row in every sink.")
    log_seconds: float = Field(10.0, gt=0, description="Longest duration of a logging window in seconds.")
    detailed_log_every: int = Field(50, ge=1, description="Steps between rows that contain every metric.")
    reduced_logging: bool = Field(False, description="True: rows contain only the basic metrics.")
    local_log_every: int = Field(200, ge=1, description="Steps after which the local log is flushed to disk.")
    local_log_seconds: float = Field(5.0, gt=0, description="Most seconds between two flushes of the local log.")
    flops_profile_freq: int = Field(
        500, ge=0, description="Steps between two counts in the modes profiler and hybrid; 0: never."
    )
    recalibration_frequency: int = Field(1000, ge=0, description="Count at least every so many steps; 0: no limit.")
    initial_profiling: bool = Field(True, description="False: no step is counted before recalibration_frequency.")
    calibration_enabled: bool = Field(True, description="False: only the first steps are counted.")
    phase_frequencies: dict[str, int] = Field(
        default={"warmup": 1000, "main": 500, "finetune": 200},
        description="flops_profile_freq by training phase; see set_phase.",
    )
    counters: bool | None = Field(
        None, description="True: read the device's hardware counters in every mode; None: only in mode hybrid."
    )
    hardware_counters_enabled: bool = Field(True, description="False: mode hybrid reads no hardware counters.")
    fallback_to_profiler: bool = Field(
        True, description="What mode hybrid is without hardware counters: profiler, or smart if False."
    )
    log_dataset_metrics: bool = Field(True, description="False: log_datasets does nothing.")
    dataset_metrics_every: int = Field(10, ge=1, description="Steps between two that log_datasets records.")
    warm_up_steps: int | Literal["auto"] = Field("auto", description="First steps, which are left out of the rates.")
    peak_tflops: float | None = Field(None, gt=0, description="Dense peak of one device, in TFLOP/s.")
    dtype: str | None = Field(None, description="Compute type whose peak MFU is compared with.")
    total_steps: int | None = Field(None, ge=1, description="Planned steps, for progress and time left.")
    batch_size: int | None = Field(None, ge=1, description="Samples per step, where no batch or mask is given.")
    seq_length: int | None = Field(None, ge=1, description="Positions per sample, where no batch or mask is given.")
    logging_rank: int = Field(0, description="The rank that writes the log; -1 is the last one.")
    data_parallel_size: int | None = Field(
        None, ge=1, description="Number of different batches per step; smaller than the world size if ranks share one."
    )
    sinks: tuple[str, ...] = Field(
        (), description="console, tensorboard, wandb, mlflow, prometheus, prometheus:PORT, module:Class."
    )

    @field_validator("sinks", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    quiet: bool = Field(False, description="True: print no lines to stderr, unless sinks has console.")
    language: Literal["auto", "en", "zh"] = Field(
        "auto", description="Of what is printed; auto is FLOPWATCH_LANG, or else the locale."
    )
    sink_options: dict[str, dict[str, Any]] = Field({}, description="Options of each sink, by the sink's name.")
    log_what_ran: bool = Field(
        True, description="False: the log does not say script, arguments, folder, git commit, user, job and packages."
    )
    strict: bool = Field(False, description="True: raise errors of the monitor instead of reporting them once.")


_FIELDS = MonitorConfig.model_fields


def read_config(
    config: "Mapping[str, Any] | str | Path | MonitorConfig | None", preset: str | None = None, **overrides: Any
) -> tuple[MonitorConfig, list[str]]:
    """Return the configuration, and one message for each unknown key or invalid value.

    Precedence: arguments in code, then the file or dict, then the preset, then the defaults. Invalid values are left
    out, because a mistake in a file must not stop a training.

    >>> config, problems = read_config({"monitoring": {"flops_profile_freq": 50, "mod": "smart"}})
    >>> config.flops_profile_freq
    50
    >>> problems
    ["monitoring.mod: not a known key; did you mean 'mode'?"]
    """
    if isinstance(config, MonitorConfig):
        config = {"flopwatch": config.model_dump(exclude_unset=True)}
    problems: list[str] = []
    given, unknown = translate(_as_dict(config, problems))
    problems += unknown
    if preset is not None and preset not in PRESETS:
        problems.append(f"there is no preset {preset!r}; use one of {', '.join(PRESETS)}")
    wanted = {**PRESETS.get(preset or "", {}), **given}
    wanted |= {name: value for name, value in overrides.items() if value is not None}
    return _without_bad_values(wanted, problems), problems


def _as_dict(config: "Mapping[str, Any] | str | Path | None", problems: list[str]) -> Mapping[str, Any]:
    if config is None or isinstance(config, Mapping):
        return config or {}
    try:
        content = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"config={str(config)!r} cannot be read ({_in_one_line(error)}); correct the path or the file")
        return {}
    if isinstance(content, Mapping):
        return content
    if content is not None:  # the file is not empty, and not all its settings are commented out
        found = type(content).__name__
        problems.append(f"config={str(config)!r} contains a {found}; write settings as lines such as 'log_every: 10'")
    return {}


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or first_line(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"not YAML: {error.problem} in line {error.problem_mark.line + 1}"
    return first_line(error)


def _without_bad_values(wanted: dict[str, Any], problems: list[str]) -> MonitorConfig:
    try:
        return MonitorConfig(**wanted)
    except ValidationError as error:
        for problem in error.errors():
            name = str(problem["loc"][0])
            problems.append(f"{name}={wanted.get(name)!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
            wanted.pop(name, None)
        return _without_bad_values(wanted, problems)


def json_ready(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


def refuse_problems(problems: list[str]) -> None:
    if problems:
        raise InputError("the monitor's configuration has mistakes: " + "; ".join(problems))


def translate(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Find the monitor's settings in a training configuration; return them, and messages about unknown keys.

    A setting at the top level, outside the monitor's sections, is used only if all keys at that level belong to the
    monitor or are misspelt, because `mode` or `dtype` in a training's configuration usually means something else.
    """
    ours = [key for key in content if key in _FIELDS or key in SECTIONS or key in MONITOR]
    ours_alone = all(key in ours or (ours and get_close_matches(str(key), _FIELDS, n=1)) for key in content)
    found: dict[str, Any] = {}
    unknown: list[str] = []
    for path, value in _leaves(content):
        name, is_in_section = _without_sections(path)
        setting = name if name in _FIELDS else MONITOR.get(name, name)
        if (name in _FIELDS or name in MONITOR) and (is_in_section or "." in name or ours_alone):
            found[setting] = value
        elif (is_in_section or ours_alone) and (name or value is not None):  # a section without settings is no mistake
            words = [*_FIELDS, *(key.rpartition(".")[2] for key in MONITOR)]
            close = get_close_matches(name.rpartition(".")[2], words, n=1)
            unknown.append(f"{path}: not a known key" + (f"; did you mean {close[0]!r}?" if close else ""))
    if not found and not unknown and not ours_alone:
        unknown += _unused(content)
    return found, unknown


def _without_sections(path: str) -> tuple[str, bool]:
    """The name of a setting without the sections around it, and whether there are any.

    >>> _without_sections("monitoring.performance_monitoring.smart_mode.initial_profiling")
    ('smart_mode.initial_profiling', True)
    """
    first, _, rest = path.partition(".")
    return (_without_sections(rest)[0], True) if first in SECTIONS else (path, False)


def _unused(content: Mapping[str, Any]) -> list[str]:
    """A message if none of a file's settings is used, because other keys stand beside them."""
    ours = [key for key in content if key in _FIELDS or key in MONITOR]
    others = [key for key in content if key not in ours and key not in SECTIONS]
    close = {key: match[0] for key in others if (match := get_close_matches(str(key), _FIELDS, n=1))}
    if not ours or not close:
        return []
    wrong = ", ".join(f"{key} (did you mean {match!r}?)" for key, match in close.items())
    return [f"{', '.join(ours)}: beside keys that are not known, {wrong}; put the settings below `flopwatch:`"]


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and _without_sections(path)[0] not in _FIELDS:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
