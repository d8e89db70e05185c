"""Names of trials, which are also names of files: `StandardTrainer_bs4_seq512`, and what else varies behind it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.trial_records import TrialSpec, content_key

_WHOLE_KEY = 20
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")


def check_label(label: str) -> str:
    """A label the user chose, as it stands; it becomes part of file names.

    >>> check_label("mine-v2")
    'mine-v2'
    """
    if not _SAFE.fullmatch(label):
        raise InputError(
            f"the label {label!r} cannot be part of a file name; use letters, digits, '.', '_', '+' and '-', "
            "beginning with a letter or digit, 80 at most"
        )
    return label


def trial_names(specs: Sequence[TrialSpec]) -> list[str]:
    """One name for each, all different: trainer, batch, length, and every other setting that varies among them."""
    varying = _varying_settings(specs)
    names = [_name(spec, varying) for spec in specs]
    counts = Counter(names)
    keys = {place: content_key(spec, {}) for place, spec in enumerate(specs) if counts[names[place]] > 1}
    digits = _digits([(names[place], key) for place, key in keys.items()])
    return [f"{name}_{keys[place][:digits]}" if place in keys else name for place, name in enumerate(names)]


def _digits(doubled: Sequence[tuple[str, str]]) -> int:
    """Of their keys, so that trials of the same name differ: of 20,000, some agree in their first 6."""
    digits = 6
    while digits < _WHOLE_KEY and len({(name, key[:digits]) for name, key in doubled}) < len(doubled):
        digits += 2
    return digits


def _varying_settings(specs: Sequence[TrialSpec]) -> list[str]:
    seen: dict[str, set[str]] = {}
    for spec in specs:
        for key, value in _other_settings(spec).items():
            seen.setdefault(key, set()).add(str(value))
    return [key for key, values in seen.items() if len(values) > 1]


def _other_settings(spec: TrialSpec) -> dict[str, Any]:
    fixed: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "device": spec.device,
        "ckpt": spec.checkpointing,
        "seed": spec.seed,
        "threads": spec.threads,
        "gpus": spec.gpus,
        "nodes": spec.nodes,
        "processes": spec.processes,
        "layout": spec.layout,
        "micro": spec.micro_batch_size,
    }
    return fixed | {f"options.{name}": value for name, value in spec.options.items()}


def _name(spec: TrialSpec, varying: Sequence[str]) -> str:
    settings = _other_settings(spec)
    parts = [_part(key, settings) for key in varying if key in settings]
    return "_".join(
        [slug(spec.label or spec.trainer), f"bs{spec.batch_size}", f"seq{spec.seq_len}", *filter(None, parts)]
    )


def _part(key: str, settings: Mapping[str, Any]) -> str:
    value = settings[key]
    if key == "ckpt":
        return "ckpt" if value else ""
    if key in ("layout", "micro") and value is None:  # of a single process; of the whole batch
        return ""
    if key == "model":
        return slug(_model_word(str(value)))
    return slug(str(value)) if key in ("dtype", "device", "layout") else slug(f"{key.removeprefix('options.')}{value}")


def _model_word(model: str) -> str:
    """A path's last telling part: the folder of a `config.json`, else the file's own name."""
    path = Path(model)
    if path.suffix == ".json":
        return path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return path.name if "/" in model else model


def slug(text: str) -> str:
    """What of a text may stand in a file name.

    >>> slug("../my models:build")
    'my-models-build'
    """
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-.")[:60] or "x"
