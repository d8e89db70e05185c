"""Sizes of the preset models, and the check of a model's name. Does not import torch, which would take seconds."""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from flopwatch.errors import InputError


@dataclass(frozen=True, slots=True)
class Preset:
    vocab_size: int
    width: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class ImagePreset:
    """Sizes of a residual network with group normalisation.

    Attributes:
        image_size: Side of the square images, in pixels.
        classes: Number of classes.
        widths: Channels of each stage; multiples of 8.
        blocks_per_stage: Number of blocks in each stage; a block has two convolutions.
        has_large_stem: Whether a 7 x 7 convolution and pooling come first, as for ImageNet.
    """

    image_size: int
    classes: int
    widths: tuple[int, ...]
    blocks_per_stage: int
    has_large_stem: bool


PRESETS = {
    "tiny": Preset(1_000, 64, 2, 4),
    "small": Preset(8_000, 256, 4, 8),
    "medium": Preset(16_000, 512, 8, 8),
    "1b": Preset(32_000, 2_048, 24, 32),
}
IMAGE_PRESETS = {
    "resnet20-gn": ImagePreset(32, 10, (16, 32, 64), 3, has_large_stem=False),  # CIFAR-10
    "resnet18-gn": ImagePreset(224, 1_000, (64, 128, 256, 512), 2, has_large_stem=True),  # ImageNet
}
MOST_PIXELS = 8192
"""The largest allowed side of an image, in pixels. A larger number is taken for a typing error."""


def image_preset(name: str) -> ImagePreset | None:
    """Return the image preset of a name, which may end in `@` and another image side; None if there is no such preset.

    >>> image_preset("resnet18-gn").image_size, image_preset("resnet18-gn@64").image_size
    (224, 64)
    """
    word, at, side = name.partition("@")
    sizes = IMAGE_PRESETS.get(word)
    if sizes is None or not at:
        return sizes
    is_side = side.isascii() and side.isdigit() and 1 <= int(side) <= MOST_PIXELS
    return replace(sizes, image_size=int(side)) if is_side else None


def check_model_name(spec: str) -> None:
    """Check the name of a model without building the model.

    Raises:
        InputError: There is no such model.
    """
    if is_config(spec):
        file = config_file(spec)
        if not file.exists():
            raise InputError(f"the model's config file {file} does not exist; correct the path, or name a preset")
    elif spec.partition("@")[0] in IMAGE_PRESETS:
        if image_preset(spec) is None:
            raise InputError(f"model {spec!r}: after @, write the side of the images in pixels, 1 to {MOST_PIXELS}")
    elif spec not in PRESETS and ":" not in spec:
        known = ", ".join((*PRESETS, *IMAGE_PRESETS))
        near = get_close_matches(spec, (*PRESETS, *IMAGE_PRESETS), n=1)
        maybe = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"model {spec!r} must be a preset ({known}), a .json file or 'module:function'{maybe}")


def is_config(spec: str) -> bool:
    is_preset = spec in PRESETS or image_preset(spec) is not None
    return not is_preset and (Path(spec).suffix == ".json" or Path(spec).is_dir())


def config_file(spec: str) -> Path:
    return Path(spec) / "config.json" if Path(spec).is_dir() else Path(spec)
