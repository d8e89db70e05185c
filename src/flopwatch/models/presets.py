"""The model sizes known by name. Sizes only: torch is not loaded before a model is built."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a decoder-only transformer."""

    vocab_size: int
    width: int
    layers: int
    heads: int


PRESETS = {
    "tiny": Preset(1_000, 64, 2, 4),
    "small": Preset(8_000, 256, 4, 8),
    "medium": Preset(16_000, 512, 8, 8),
    "1b": Preset(32_000, 2_048, 24, 32),
}
