"""Makes the names of trials, and checks the names that a user writes before anything runs.

A trial's name, such as `StandardTrainer_bs4_seq512_bf16`, contains every setting that varies; files are named after it.
Names are checked without importing the user's code, because an import would run it and load torch.
"""

import difflib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.models.presets import check_model_name
from flopwatch.records.settings import SETTINGS, placeholders
from flopwatch.records.trial import COMMAND, LABELS, TrialSpec, content_key
from flopwatch.sweep.spec.parsing import did_you_mean
from flopwatch.sweep.trainers.options import read_options
from flopwatch.text import one_line

_WHOLE_KEY = 20  # digits of a content key, which is a hash of a trial's settings
_ALWAYS_NAMED = ("trainer", "batch_size", "seq_len")
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")


def check_label(label: str) -> str:
    """Return the user's label; raise InputError if it cannot be part of a file name.

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
    """A unique name for each trial: trainer, batch size, length, and every other setting that varies among them."""
    axes = [name for name, setting in SETTINGS.items() if setting.axis is not None and name not in _ALWAYS_NAMED]
    settings = [
        {name: getattr(spec, name) for name in axes}
        | {f"options.{name}": value for name, value in spec.options.items()}
        for spec in specs
    ]
    values: dict[str, set[str]] = defaultdict(set)
    for key, value in itertools.chain.from_iterable(each.items() for each in settings):
        values[key].add(str(value))
    names = []
    for spec, own in zip(specs, settings, strict=True):
        varying = [_part(key, own[key]) for key in values if key in own and len(values[key]) > 1]
        first = slug(spec.label or spec.trainer), f"bs{spec.batch_size}", f"seq{spec.seq_len}"
        names.append("_".join((*first, *filter(None, varying))))
    counts = Counter(names)
    keys = {place: content_key(spec, {}) for place, spec in enumerate(specs) if counts[names[place]] > 1}
    digits = 6  # of the key, behind equal names; more if six do not make the names unique
    while digits < _WHOLE_KEY and len({(names[place], key[:digits]) for place, key in keys.items()}) < len(keys):
        digits += 2
    return [f"{name}_{keys[place][:digits]}" if place in keys else name for place, name in enumerate(names)]


def _part(key: str, value: Any) -> str:
    if key == "model":
        path = Path(value)  # the folder of a `config.json` identifies the model, else the file's name
        in_folder = path.name == "config.json" and path.parent.name
        return slug(path.parent.name if in_folder else path.stem if path.suffix == ".json" else path.name)
    if key not in SETTINGS:
        return slug(f"{key.removeprefix('options.')}{value}")
    own = SETTINGS[key].word
    word = key if own is None else own
    return slug(f"{word}{value}") if value is not None and not isinstance(value, bool) else word if value else ""


def slug(text: str) -> str:
    """The text with `-` in place of all characters that cannot be part of a file name.

    >>> slug("../my models:build")
    'my-models-build'
    """
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-.")[:60] or "x"


DTYPES = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "npu", "privateuseone")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_ALIKE = 0.75  # similarity at which a word is a typo of a placeholder; at difflib's default of 0.6, {date} would be one


def check_names(specs: Sequence[TrialSpec]) -> None:
    """Raise InputError for the first unknown name; a user's trainers and models may exist only on another host."""
    ours = [spec for spec in specs if spec.trainer != COMMAND]
    for dtype in dict.fromkeys(spec.dtype for spec in ours):
        if dtype not in DTYPES:
            raise InputError(f"there is no dtype {one_line(dtype, 100)!r}{did_you_mean(dtype, DTYPES)}")
    for device in dict.fromkeys(spec.device for spec in ours):
        if not re.fullmatch(rf"({'|'.join(DEVICES)})(:\d+)?", device):
            raise InputError(f"there is no device {one_line(device, 100)!r}{did_you_mean(device, DEVICES)}")
    for model in dict.fromkeys(spec.model for spec in ours):
        check_model_name(model)
    for spec in {repr(spec.options): spec for spec in ours if spec.trainer in LABELS}.values():
        read_options(spec.options)
    for spec in {str(spec.command): spec for spec in specs if spec.trainer == COMMAND}.values():
        _check_placeholders(spec)


def _check_placeholders(spec: TrialSpec) -> None:
    """Raise InputError for a word in braces that is similar to a placeholder; other braces belong to the shell."""
    known = (*placeholders(spec), "trial_dir")
    for word in _PLACEHOLDER.findall(spec.command or ""):
        near = difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)
        if word not in known and near:
            raise InputError(
                f"the command has {{{word}}}, which flopwatch does not replace; did you mean {{{near[0]}}}?"
            )
