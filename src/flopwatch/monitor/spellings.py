"""The names a configuration may use: ours, and every spelling of the users' documents."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

_SECTIONS = ("flopwatch", "monitoring", "monitor")
"""Ours alone, so an unknown key in them is a slip. Sections such as `training` hold other people's keys as well."""

_MONITORING = {
    "mfu_calculation_mode": "mode",
    "performance_monitoring.measure_flops_frequency": "flops_profile_freq",
    "performance_monitoring.smart_mode.initial_profiling": "initial_profiling",
    "performance_monitoring.smart_mode.calibration_enabled": "calibration_enabled",
    "performance_monitoring.smart_mode.recalibration_frequency": "recalibration_frequency",
    "performance_monitoring.hybrid_mode.hardware_counters_enabled": "hardware_counters_enabled",
    "performance_monitoring.hybrid_mode.fallback_to_profiler": "fallback_to_profiler",
    "smart_mode.initial_profiling": "initial_profiling",
    "smart_mode.calibration_enabled": "calibration_enabled",
    "smart_mode.recalibration_frequency": "recalibration_frequency",
    "hybrid_mode.hardware_counters_enabled": "hardware_counters_enabled",
    "hybrid_mode.fallback_to_profiler": "fallback_to_profiler",
    "freq.flops_profile_freq": "flops_profile_freq",
    "measure_flops_frequency": "flops_profile_freq",
}

SPELLINGS: Mapping[str, str] = {
    **{f"{section}.{name}": ours for section in _SECTIONS for name, ours in _MONITORING.items()},
    **{name: ours for name, ours in _MONITORING.items() if "." in name},
    "training.logging_steps": "log_every",
    "training.eval_steps": "eval_steps",
    "training.save_steps": "save_steps",
    "wandb.log_dataset_metrics": "log_dataset_metrics",
    "wandb.reduced_logging": "reduced_logging",
}
"""Dotted path in the file to the name of the setting."""


def translate(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our settings out of a whole training configuration, and the keys of our sections that nobody knows.

    Settings may stand at the top when nothing else does: a training's own `mode` or `dtype` is not ours.
    """
    from flopwatch.monitor.config import MonitorConfig

    fields = MonitorConfig.model_fields
    ours_alone = all(key in fields or key in _SECTIONS for key in content)
    found: dict[str, Any] = {}
    unknown: list[str] = []
    for path, value in _leaves(content, fields):
        section, _, name = path.partition(".")
        if path in SPELLINGS:
            found[SPELLINGS[path]] = value
        elif not name and path in fields and ours_alone:
            found[path] = value
        elif section in _SECTIONS and name in fields:
            found[name] = value
        elif section in _SECTIONS:
            unknown.append(_unknown(path, name, fields))
    return found, unknown


def _leaves(content: Mapping[str, Any], fields: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        path = f"{prefix}{key}"
        is_setting = path in fields or path.partition(".")[2] in fields
        if isinstance(value, Mapping) and not is_setting:
            yield from _leaves(value, fields, f"{path}.")
        else:
            yield path, value


def _unknown(path: str, name: str, fields: Any) -> str:
    close = get_close_matches(name.rpartition(".")[2], [*fields, *(key.rpartition(".")[2] for key in _MONITORING)], n=1)
    return f"{path}: not a known key" + (f"; did you mean {close[0]!r}?" if close else "")
