"""Batches for tasks of transformers. A model says neither the shape of its pixels nor that of its sounds, so each task
has several recipes, tried in turn; the first with which a real step runs is taken.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.specimen import Shape
from zoo.truth import SEED

Batch = dict[str, Any]
_FIRST_WORD, _LAST_WORD = 100, 380
"""Ordinary ids: above the models' own special ones, below the placeholders of `shrinking.py`."""
TEXT_EXAMPLE = Shape(2, 24, 14)


@dataclass(frozen=True)
class Ingredients:
    """What batches for this model are made of."""

    config: Any
    arguments: frozenset[str]
    image_token: int | None
    image_size: int
    channels: int

    @classmethod
    def of(cls, model: nn.Module) -> "Ingredients":
        config = model.config
        names = ("image_token_id", "image_token_index", "image_token_idx", "media_token_id")
        tokens = [getattr(config, name, None) for name in names]
        return cls(
            config,
            frozenset(inspect.signature(model.forward).parameters),
            next((token for token in tokens if isinstance(token, int)), None),
            _side(_found(config, "image_size", 64)),
            _side(_found(config, "num_channels", 3)),
        )

    def only_taken(self, batch: Batch) -> Batch:
        return {name: value for name, value in batch.items() if name in self.arguments}


@dataclass(frozen=True)
class Recipe:
    """One way to make a batch."""

    make: Callable[[Shape], Batch]
    example: Shape
    has_length: bool = False
    has_target: bool = False
    remark: str = ""
    with_placeholders: "Callable[[int], Recipe] | None" = None
    """The same recipe with so many placeholders per sample, for models that compare them with their images."""

    def repaired_by(self, error: Exception) -> "Recipe | None":
        """The recipe with as many placeholders as the error says the images need."""
        if self.with_placeholders is None:
            return None
        features = re.search(r"features:?\s*(?:torch\.Size\(\[)?(\d+)", str(error))
        if features is None:
            return None
        return self.with_placeholders(max(1, int(features[1]) // self.example.batch_size))


def _found(config: Any, name: str, default: Any) -> Any:
    for part in (config, *(getattr(config, inner, None) for inner in getattr(config, "sub_configs", {}))):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value["height"] if isinstance(value, dict) else value)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def words(batch_size: int, length: int) -> torch.Tensor:
    return torch.randint(_FIRST_WORD, _LAST_WORD, (batch_size, length), generator=_generator())


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator())


def _text(ingredients: Ingredients, shape: Shape, *, labels: str = "words") -> Batch:
    ids = words(shape.batch_size, shape.length)
    label = {"words": ids.clone(), "class": torch.zeros(shape.batch_size, dtype=torch.long)}.get(labels)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return ingredients.only_taken(batch if label is None else {**batch, "labels": label})


def text_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    for labels in ("words", "class", "none"):
        yield Recipe(partial(_text, ingredients, labels=labels), TEXT_EXAMPLE, has_length=True)


def _source_and_target(ingredients: Ingredients, shape: Shape) -> Batch:
    batch = _text(ingredients, shape)
    return {**batch, "labels": words(shape.batch_size, shape.target_length)}


def translation_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    if "decoder_input_ids" in ingredients.arguments:
        yield Recipe(partial(_source_and_target, ingredients), TEXT_EXAMPLE, has_length=True, has_target=True)
        yield from speech_recipes(ingredients)
    else:  # a language model with ears or eyes: the text part
        yield from image_text_recipes(ingredients)


def _sound(ingredients: Ingredients, form: str, labels: str, shape: Shape) -> Batch:
    size, length = shape.batch_size, shape.length
    bins = int(_found(ingredients.config, "num_mel_bins", 0) or 0)
    bins = bins or int(_found(ingredients.config, "feature_projection_input_dim", 0) or 0) or 80
    sounds = {
        "waves": ("input_values", (size, length)),
        "frames first": ("input_features", (size, length, bins)),
        "bins first": ("input_features", (size, bins, length)),
        "frames of values": ("input_values", (size, length, bins)),
        "channel of waves": ("input_values", (size, 1, length)),
    }
    name, sound_shape = sounds[form]
    made: Batch = {name: noise(*sound_shape), "attention_mask": torch.ones(size, length, dtype=torch.long)}
    if form not in ("waves", "frames first"):
        del made["attention_mask"]
    made["labels"] = {"words": words(size, shape.target_length), "class": torch.zeros(size, dtype=torch.long)}.get(
        labels
    )
    return {key: value for key, value in ingredients.only_taken(made).items() if value is not None}


def speech_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    positions = int(_found(ingredients.config, "max_source_positions", 0) or 0)
    takes_waves = "input_values" in ingredients.arguments
    forms = ("waves", "frames of values", "channel of waves") if takes_waves else ("frames first", "bins first")
    for labels in ("words", "class", "none"):
        for form in forms:
            lengths = {"waves": (2400,), "channel of waves": (2400,), "bins first": (2 * positions, 3000, 128)}
            for length in lengths.get(form, (96, 1024)):
                varies = form in ("waves", "frames first")
                # A decoder's own words are a sequence of their own only where there is a decoder.
                target = labels == "words" and "decoder_input_ids" in ingredients.arguments
                example = Shape(2, length, 9)
                make = partial(_sound, ingredients, form, labels)
                yield Recipe(make, example, has_length=varies, has_target=target and varies)


def _image(ingredients: Ingredients, size: int, labels: str, frames: int, shape: Shape) -> Batch:
    count = shape.batch_size
    inner = (frames,) if frames else ()
    made: Batch = {"pixel_values": noise(count, *inner, ingredients.channels, size, size)}
    if labels == "class":
        made["labels"] = torch.zeros(count, dtype=torch.long)
    if labels == "map":
        made["labels"] = torch.zeros(count, size, size, dtype=torch.long)
    made = ingredients.only_taken(made) if "pixel_values" in ingredients.arguments else made
    if "pixel_values_videos" in ingredients.arguments and frames:
        return {"pixel_values_videos": noise(count, *inner, ingredients.channels, size, size)}
    return made


def image_recipes(ingredients: Ingredients, *, tasks: tuple[str, ...] = ("class", "map", "none")) -> Iterator[Recipe]:
    video = int(_found(ingredients.config, "num_frames", _found(ingredients.config, "frames_per_clip", 4)) or 4)
    for labels in tasks:
        for size in dict.fromkeys((ingredients.image_size, 64, 224)):
            for frames in dict.fromkeys((0, video)):
                yield Recipe(partial(_image, ingredients, size, labels, frames), Shape(2))


def _with_image(ingredients: Ingredients, size: int, placeholders: int, inner: tuple[int, ...], shape: Shape) -> Batch:
    """Words with the placeholders of one image in front, and that image."""
    batch = _text(ingredients, shape)
    if ingredients.image_token is not None and placeholders:
        batch["input_ids"][:, 1 : 1 + placeholders] = ingredients.image_token
        if "labels" in batch:
            batch["labels"] = batch["input_ids"].clone()
    batch["pixel_values"] = noise(shape.batch_size, *inner, ingredients.channels, size, size)
    if "image_sizes" in ingredients.arguments and len(inner) == 1:  # an image in tiles
        batch["image_sizes"] = torch.tensor([[size, size]] * shape.batch_size)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in ingredients.arguments:
            batch[name] = (batch["input_ids"] == ingredients.image_token).long()
    return batch


def _image_text(ingredients: Ingredients, size: int, inner: tuple[int, ...], placeholders: int) -> Recipe:
    example = Shape(2, 24 + placeholders)
    make = partial(_with_image, ingredients, size, placeholders, inner)
    again = partial(_image_text, ingredients, size, inner)
    return Recipe(make, example, has_length=True, remark=" with images", with_placeholders=again)


def _with_patches(ingredients: Ingredients, placeholders: int, shape: Shape) -> Batch:
    """As Qwen2-VL: patches of all images in one list, and each image's grid of frames, rows and columns."""
    batch = _with_image(ingredients, 8, placeholders, (), shape)
    vision = ingredients.config.vision_config
    per_patch = 3 * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
    grid = (1, 4, 4)
    batch["pixel_values"] = noise(shape.batch_size * 16, per_patch)
    batch["image_grid_thw"] = torch.tensor([grid] * shape.batch_size)
    return batch


def _patches_text(ingredients: Ingredients, placeholders: int) -> Recipe:
    make = partial(_with_patches, ingredients, placeholders)
    again = partial(_patches_text, ingredients)
    return Recipe(make, Shape(2, 24 + placeholders), has_length=True, remark=" with images", with_placeholders=again)


def image_text_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    if "image_grid_thw" in ingredients.arguments and hasattr(ingredients.config, "vision_config"):
        yield _patches_text(ingredients, 4)
    if "pixel_values" in ingredients.arguments:
        for inner in ((), (1,), (3,), (1, 1)):
            yield _image_text(ingredients, ingredients.image_size, inner, 16)
        if "decoder_input_ids" in ingredients.arguments:
            yield from _captioning_recipes(ingredients)
    if "input_ids" in ingredients.arguments:
        text = partial(_text, ingredients)
        yield Recipe(text, TEXT_EXAMPLE, has_length=True, remark=", text alone")
        yield from text_recipes(ingredients)


def _caption(ingredients: Ingredients, size: int, shape: Shape) -> Batch:
    return {
        "pixel_values": noise(shape.batch_size, ingredients.channels, size, size),
        "labels": words(shape.batch_size, TEXT_EXAMPLE.target_length),
    }


def _captioning_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    yield Recipe(partial(_caption, ingredients, ingredients.image_size), Shape(2), remark=" with images")


def _pairs(ingredients: Ingredients, shape: Shape) -> Batch:
    text = _text(ingredients, shape, labels="none")
    size = ingredients.image_size
    pixels = noise(shape.batch_size, ingredients.channels, size, size)
    return ingredients.only_taken({**text, "pixel_values": pixels, "return_loss": True})


def contrastive_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    yield Recipe(partial(_pairs, ingredients), TEXT_EXAMPLE, has_length=True)
    yield Recipe(partial(_pairs, replace(ingredients, image_size=64)), TEXT_EXAMPLE, has_length=True)
    yield Recipe(partial(_pairs, ingredients), replace(TEXT_EXAMPLE, length=64))


def _series(ingredients: Ingredients, shape: Shape) -> Batch:
    config = ingredients.config
    channels = int(getattr(config, "num_input_channels", 1) or 1)
    context = int(getattr(config, "context_length", 32) or 32)
    horizon = int(getattr(config, "prediction_length", 8) or 8)
    return ingredients.only_taken(
        {
            "past_values": noise(shape.batch_size, context, channels),
            "future_values": noise(shape.batch_size, horizon, channels),
        }
    )


def series_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    yield Recipe(partial(_series, ingredients), Shape(2))


def any_recipes(ingredients: Ingredients) -> Iterator[Recipe]:
    """For tasks that mix kinds of models: whatever its arguments allow."""
    if "input_ids" in ingredients.arguments and "pixel_values" in ingredients.arguments:
        yield from image_text_recipes(ingredients)
        yield from contrastive_recipes(ingredients)
    if "input_ids" in ingredients.arguments:
        yield from text_recipes(ingredients)
    if {"input_values", "input_features"} & ingredients.arguments:
        yield from speech_recipes(ingredients)
    if {"pixel_values", "pixel_values_videos"} & ingredients.arguments:
        yield from image_recipes(ingredients)
    yield from series_recipes(ingredients)


_Recipes = Callable[[Ingredients], Iterator[Recipe]]

BATCHES: dict[str, _Recipes] = {
    "SEQ_TO_SEQ_CAUSAL_LM": translation_recipes,
    "SPEECH_SEQ_2_SEQ": speech_recipes,
    "CTC": speech_recipes,
    "RNNT": speech_recipes,
    "MASKED_LM": any_recipes,
    "IMAGE_TEXT_TO_TEXT": image_text_recipes,
    "CAUSAL_LM": any_recipes,
    "IMAGE_CLASSIFICATION": image_recipes,
    "AUDIO_CLASSIFICATION": speech_recipes,
    "VIDEO_CLASSIFICATION": image_recipes,
    "SEMANTIC_SEGMENTATION": partial(image_recipes, tasks=("map", "none")),
    "DEPTH_ESTIMATION": partial(image_recipes, tasks=("none",)),
    "ZERO_SHOT_IMAGE_CLASSIFICATION": contrastive_recipes,
    "MASKED_IMAGE_MODELING": partial(image_recipes, tasks=("none",)),
    "TIME_SERIES_PREDICTION": series_recipes,
    "SEQUENCE_CLASSIFICATION": any_recipes,
    "QUESTION_ANSWERING": any_recipes,
    "OBJECT_DETECTION": partial(image_recipes, tasks=("none",)),
    "UNIVERSAL_SEGMENTATION": partial(image_recipes, tasks=("none",)),
    "MULTIMODAL_LM": any_recipes,
    "PRETRAINING": any_recipes,
    "BACKBONE": partial(image_recipes, tasks=("none",)),
    "TEXT_ENCODING": any_recipes,
}
