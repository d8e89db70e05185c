"""Specimens of transformers: one per type of model, of the first task in `TASKS` that has it."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from zoo.hugging_face_batches import BATCHES, Batch, Ingredients, Recipe
from zoo.hugging_face_special import SPECIAL
from zoo.shrinking import tiny_config
from zoo.specimen import Specimen
from zoo.truth import SEED, call, step_loss

TASKS: dict[str, str] = {
    "SEQ_TO_SEQ_CAUSAL_LM": "encoder-decoder",
    "SPEECH_SEQ_2_SEQ": "speech",
    "CTC": "speech",
    "RNNT": "speech",
    "MASKED_LM": "encoder",
    "IMAGE_TEXT_TO_TEXT": "vision-language",
    "CAUSAL_LM": "decoder",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "contrastive",
    "IMAGE_CLASSIFICATION": "vision",
    "AUDIO_CLASSIFICATION": "speech",
    "VIDEO_CLASSIFICATION": "vision",
    "SEMANTIC_SEGMENTATION": "vision",
    "DEPTH_ESTIMATION": "vision",
    "MASKED_IMAGE_MODELING": "vision",
    "TIME_SERIES_PREDICTION": "time series",
    "SEQUENCE_CLASSIFICATION": "encoder",
    "QUESTION_ANSWERING": "encoder",
    "OBJECT_DETECTION": "vision",
    "UNIVERSAL_SEGMENTATION": "vision",
    "MULTIMODAL_LM": "vision-language",
    "PRETRAINING": "encoder",
    "BACKBONE": "vision",
    "TEXT_ENCODING": "encoder",
}


def architectures() -> dict[str, tuple[str, str]]:
    """Names like `llama` to the task and the class."""
    found: dict[str, tuple[str, str]] = {}
    for task in TASKS:
        for model_type, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(model_type, (task, classes if isinstance(classes, str) else classes[0]))
    return dict(sorted(found.items()))


def specimen(model_type: str) -> Specimen:
    """Builds the model and tries batches until one runs."""
    task, class_name = architectures()[model_type]
    build = partial(_build, model_type, class_name)
    model = build(True)
    ingredients = Ingredients.of(model)
    recipe = _first_that_runs(model, BATCHES[task](ingredients))
    of_features = "input_features" in recipe.make(recipe.example)
    return Specimen(
        TASKS[task] + recipe.remark,
        build,
        recipe.make,
        recipe.example,
        has_length=recipe.has_length,
        has_target=recipe.has_target,
        law_length="target_length" if of_features else "length",
        takes_mask=recipe.has_length and "attention_mask" in ingredients.arguments,
        takes_target_mask="decoder_attention_mask" in ingredients.arguments,
    )


def _build(model_type: str, class_name: str, eager: bool) -> nn.Module:
    config = tiny_config(model_type, SPECIAL.get(model_type, {}))
    if eager:
        config._attn_implementation = "eager"
    torch.manual_seed(SEED)
    model: nn.Module = getattr(transformers, class_name)(config)
    if eager:
        _set_eager_experts(model)
    return model.float().train()


def _set_eager_experts(model: nn.Module) -> None:
    setter: Callable[[str], None] | None = getattr(model, "set_experts_implementation", None)
    try:
        if setter is not None:
            setter("eager")
    except (ValueError, AttributeError, KeyError):
        return  # a model without experts


def _first_that_runs(model: nn.Module, recipes: Iterator[Recipe]) -> Recipe:
    first_error: Exception | None = None
    for recipe in recipes:
        attempt: Recipe | None = recipe
        for _ in range(2):  # as it is, and with as many placeholders as the model asked for
            if attempt is None:
                break
            try:
                _run(model, attempt.make(attempt.example))
                return attempt
            except Exception as error:
                first_error = first_error or error
                attempt = attempt.repaired_by(error)
    raise first_error or LookupError("no recipe for a batch")


def _run(model: nn.Module, batch: Batch) -> None:
    step_loss(call(model, batch)).backward()
    model.zero_grad()
