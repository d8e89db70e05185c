"""Names a sweep cannot work with, told before anything runs. Nothing of the user's is imported, and no torch."""

import difflib
import re
from collections.abc import Iterable, Sequence

from flopwatch.errors import InputError
from flopwatch.models.names import check_model_name, is_config
from flopwatch.models.presets import PRESETS, image_preset
from flopwatch.plain_text import one_line
from flopwatch.sweep.find_module import check_attribute
from flopwatch.sweep.spelling import did_you_mean
from flopwatch.sweep.trainers.names import COMMAND, LABELS
from flopwatch.sweep.trainers.options import read_options
from flopwatch.trial_records import TrialSpec

DTYPES = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "npu", "privateuseone")
_PLACEHOLDERS = ("batch_size", "micro_batch_size", "seq_len", "model", "dtype", "seed", "trial_dir")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_ALIKE = 0.75


def check_names(specs: Sequence[TrialSpec], *, with_modules: bool = True) -> None:
    """Raise InputError for the first name that cannot be: a typo must not cost a night.

    Args:
        specs: All trials.
        with_modules: Whether trainers and models of the user's must be found here; False where they are on the nodes
            of a cluster only.
    """
    ours = [spec for spec in specs if spec.trainer != COMMAND]
    for dtype in _distinct(spec.dtype for spec in ours):
        if dtype not in DTYPES:
            raise InputError(f"there is no dtype {_shown(dtype)}{did_you_mean(dtype, DTYPES)}")
    for device in _distinct(spec.device for spec in ours):
        if not re.fullmatch(rf"({'|'.join(DEVICES)})(:\d+)?", device):
            raise InputError(f"there is no device {_shown(device)}{did_you_mean(device, DEVICES)}")
    for spec in {repr(spec.options): spec for spec in ours if spec.trainer in LABELS}.values():
        read_options(spec.options)
    if with_modules:
        _check_modules(ours)
    for spec in {str(spec.command): spec for spec in specs if spec.trainer == COMMAND}.values():
        _check_placeholders(spec)


def _check_modules(specs: Sequence[TrialSpec]) -> None:
    for trainer in _distinct(spec.trainer for spec in specs if spec.trainer not in LABELS):
        check_attribute("trainer", trainer)
    for model in _distinct(spec.model for spec in specs):
        check_model_name(model)
        if model not in PRESETS and image_preset(model) is None and not is_config(model):
            check_attribute("model", model)
    for batch in _distinct(spec.batch for spec in specs if spec.batch is not None):
        check_attribute("batch", batch)


def _check_placeholders(spec: TrialSpec) -> None:
    """Shell commands have braces of their own, so only what is nearly one of ours is taken for a typo."""
    known = (*_PLACEHOLDERS, *spec.options)
    for word in _PLACEHOLDER.findall(spec.command or ""):
        near = difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)
        if word not in known and near:
            raise InputError(f"the command has {{{word}}}, which nothing fills in; did you mean {{{near[0]}}}?")


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _shown(name: str) -> str:
    return repr(one_line(name, 100))
