"""The names of trainers: class names (docs/requirements.md, R23), short names, and `package.module:Class`.

Standard library only, because both the sweep and the report use it.
"""

import difflib
import re

from flopwatch.errors import InputError

LABELS = {
    "standard": "StandardTrainer",
    "dpsgd": "DPSGDTrainer",
    "ghost": "DPGhostClippingTrainer",
    "fast": "DPFastGradientClippingTrainer",
}
"""The built-in trainers and their class names, which appear in file names and tables."""

PRIVATE = ("dpsgd", "ghost", "fast")
"""The trainers that clip the gradient of every sample and add noise."""

COMMAND = "command"

_SHORT_FORMS = {
    "standard": ("standard", "plain"),
    "dpsgd": ("dpsgd", "dp", "hooks"),
    "ghost": ("ghost", "ghostclipping", "dpghost", "dpghostclipping"),
    "fast": ("fast", "fastclipping", "fastgradientclipping", "dpfast", "dpfastgradientclipping", "fgc"),
}
_TRAINER_OF_FORM = {form: trainer for trainer, forms in _SHORT_FORMS.items() for form in forms}
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def canonical_trainer(name: str) -> tuple[str, str]:
    """The trainer of this name, and its label in file names and tables.

    >>> canonical_trainer("DPGhostClippingTrainer")
    ('ghost', 'DPGhostClippingTrainer')
    >>> canonical_trainer("dp-sgd")
    ('dpsgd', 'DPSGDTrainer')
    >>> canonical_trainer("my_package.training:Lora")
    ('my_package.training:Lora', 'Lora')
    """
    plain = name.strip()
    if plain == COMMAND:
        return COMMAND, COMMAND
    if ":" in plain:
        if not _PATH.fullmatch(plain):
            raise InputError(f"trainer {name!r} is not of the form 'package.module:Class'")
        return plain, plain.partition(":")[2]
    trainer = _TRAINER_OF_FORM.get(re.sub(r"[-_ ]", "", plain.lower()).removesuffix("trainer"))
    if trainer is None:
        raise InputError(_unknown(name))
    return trainer, LABELS[trainer]


def is_private(trainer: str) -> bool | None:
    """Whether the trainer clips per sample and adds noise; None if it is not a built-in one."""
    return trainer in PRIVATE if trainer in LABELS else None


def _unknown(name: str) -> str:
    known = [spelling for pair in LABELS.items() for spelling in pair]
    folded = {spelling.lower(): spelling for spelling in known}
    near = difflib.get_close_matches(name.strip().lower(), folded, n=1)
    hint = f"; did you mean {folded[near[0]]!r}?" if near else "."
    return f"there is no trainer {name!r}{hint} There are {', '.join(LABELS)} and your own as 'package.module:Class'"
