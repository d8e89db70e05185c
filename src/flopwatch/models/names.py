"""How users name models. Nothing is built or imported, so that a mistake is told before any process is started."""

from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.models.presets import IMAGE_PRESETS, MOST_PIXELS, PRESETS, image_preset


def check_model_name(spec: str) -> None:
    """Raises:
    InputError: There can be no such model.
    """
    if is_config(spec):
        file = config_file(spec)
        if not file.exists():
            raise InputError(f"there is no file {file}")
    elif spec.partition("@")[0] in IMAGE_PRESETS:
        if image_preset(spec) is None:
            raise InputError(f"model {spec!r}: behind the @ stands the side of the images, 1 to {MOST_PIXELS} pixels")
    elif spec not in PRESETS and ":" not in spec:
        known = ", ".join((*PRESETS, *IMAGE_PRESETS))
        raise InputError(f"model {spec!r} is none of the presets ({known}), no .json file and no 'module:function'")


def is_config(spec: str) -> bool:
    """Whether it names a Hugging Face config."""
    is_preset = spec in PRESETS or image_preset(spec) is not None
    return not is_preset and (Path(spec).suffix == ".json" or Path(spec).is_dir())


def config_file(spec: str) -> Path:
    return Path(spec) / "config.json" if Path(spec).is_dir() else Path(spec)
