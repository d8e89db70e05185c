"""Makes the names of trials, and checks the names that a user writes before anything runs.

A trial's name, such as `StandardTrainer_bs4_seq512_bf16`, contains every setting that varies; files are named after it.
Names of trainers, models, dtypes and devices are checked without importing the user's code, because an import would run
it and load torch.
"""

import difflib
import itertools
import os
import re
import symtable
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.models.presets import PRESETS, check_model_name, image_preset, is_config
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


def check_attribute(what: str, name: str) -> None:
    """Raise InputError when `package.module:name` certainly does not exist; the working directory is searched first."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = _find(what, name, module)
    finally:
        sys.path.pop(0)
    if found is not None and found.origin and found.origin.endswith(".py"):
        _check_source(what, name, Path(found.origin), attribute.partition(".")[0])


def _find(what: str, name: str, module: str) -> ModuleSpec | None:
    """The module's spec; None if only importing the module could show whether it exists."""
    place: Any = None
    found: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        part = ".".join(parts[:count])
        try:
            finds = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
            found = next(filter(None, (find(part, place) for find in finds)), None)
        except Exception:  # noqa: BLE001 - an import hook of another package may raise anything
            return None
        if found is None:
            where = f"in {one_line(os.getcwd())} or on Python's path" if count == 1 else f"in {parts[count - 2]}"
            raise InputError(
                f"{what} {one_line(name, 200)!r} cannot be loaded: there is no module {part!r} {where}; correct the "
                "name, change to the folder of the module, or set PYTHONPATH"
            )
        place = found.submodule_search_locations
        if place is None and count < len(parts):
            return None  # the rest of the name may be an attribute of the module, such as `path` of `os`
    return found


def _check_source(what: str, name: str, file: Path, attribute: str) -> None:
    try:
        text = file.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(file), "exec").get_symbols()
    except SyntaxError as error:
        raise InputError(f"{what} {name!r} cannot be loaded: {file}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError):
        return
    names = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    if attribute not in names and "__getattr__" not in names and not _MAY_DEFINE_MORE.search(text):
        hint = did_you_mean(attribute, sorted(known for known in names if not known.startswith("_"))[:20])
        raise InputError(f"{what} {name!r} cannot be loaded: {file} defines no {attribute!r}{hint}")


_MAY_DEFINE_MORE = re.compile(r"\bglobals\(\)|\bimport\s*\*")


DTYPES = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "npu", "privateuseone")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_ALIKE = 0.75  # similarity at which a word is a typo of a placeholder; at difflib's default of 0.6, {date} would be one


def check_names(specs: Sequence[TrialSpec], *, with_modules: bool = True) -> None:
    """Raise InputError for the first unknown name, so that no sweep starts with a typo.

    `with_modules` is False if the user's trainers and models may exist only on the nodes of a cluster.
    """
    ours = [spec for spec in specs if spec.trainer != COMMAND]
    for dtype in dict.fromkeys(spec.dtype for spec in ours):
        if dtype not in DTYPES:
            raise InputError(f"there is no dtype {one_line(dtype, 100)!r}{did_you_mean(dtype, DTYPES)}")
    for device in dict.fromkeys(spec.device for spec in ours):
        if not re.fullmatch(rf"({'|'.join(DEVICES)})(:\d+)?", device):
            raise InputError(f"there is no device {one_line(device, 100)!r}{did_you_mean(device, DEVICES)}")
    for spec in {repr(spec.options): spec for spec in ours if spec.trainer in LABELS}.values():
        read_options(spec.options)
    if with_modules:
        _check_modules(ours)
    for spec in {str(spec.command): spec for spec in specs if spec.trainer == COMMAND}.values():
        _check_placeholders(spec)


def _check_modules(specs: Sequence[TrialSpec]) -> None:
    for trainer in dict.fromkeys(spec.trainer for spec in specs if spec.trainer not in LABELS):
        check_attribute("trainer", trainer)
    for model in dict.fromkeys(spec.model for spec in specs):
        check_model_name(model)
        if model not in PRESETS and image_preset(model) is None and not is_config(model):
            check_attribute("model", model)
    for batch in dict.fromkeys(spec.batch for spec in specs if spec.batch is not None):
        check_attribute("batch", batch)


def _check_placeholders(spec: TrialSpec) -> None:
    """Raise InputError for a word in braces that is similar to a placeholder; other braces belong to the shell."""
    known = (*placeholders(spec), "trial_dir")
    for word in _PLACEHOLDER.findall(spec.command or ""):
        near = difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)
        if word not in known and near:
            raise InputError(
                f"the command has {{{word}}}, which flopwatch does not replace; did you mean {{{near[0]}}}?"
            )
