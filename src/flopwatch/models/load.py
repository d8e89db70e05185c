"""Builds a model from a preset, a Hugging Face config file or a user's function, and a batch of zeros for it."""

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.models.networks import Decoder, ResNet
from flopwatch.models.presets import PRESETS, check_model_name, config_file, image_preset, is_config
from flopwatch.optional import require


def load_model(spec: str, *, device: str = "meta") -> nn.Module:
    """Build a model in training mode; on the meta device it has shapes but no weights.

    Args:
        spec: `tiny`, `small`, `medium` or `1b`; `resnet20-gn` or `resnet18-gn` for images, with another side as
            `resnet18-gn@64`; the path of a Hugging Face `config.json`; or `package.module:function`, a function
            without arguments that returns a module.
        device: Where its parameters are created.
    """
    check_model_name(spec)
    if spec in PRESETS:
        with torch.device(device):
            return Decoder(PRESETS[spec]).train()
    if (sizes := image_preset(spec)) is not None:
        with torch.device(device):
            return ResNet(sizes).train()
    if is_config(spec):
        return _from_config_file(config_file(spec), device)
    return _from_factory(spec, device)


def _from_config_file(file: Path, device: str) -> nn.Module:
    try:
        settings: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise InputError(f"{file} has no 'model_type', so it is not the config.json of a Hugging Face model")
    transformers = require("transformers", "hf")
    try:
        config = transformers.AutoConfig.for_model(**settings)
        build = _builder(transformers, settings, config)
        with torch.device(device):
            model: nn.Module = build(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"transformers {transformers.__version__} cannot build {file}: {error}") from error
    return model.train()


def _builder(transformers: Any, settings: dict[str, Any], config: Any) -> Any:
    """The class that the file names; a causal language model if it names none."""
    names = settings.get("architectures") or []
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM.from_config


def _from_factory(spec: str, device: str) -> nn.Module:
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(0, "")  # as `python -m` does, for files in the working directory
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load {spec!r}: {error}") from error
    finally:
        sys.path.remove("")
    try:
        with torch.device(device):
            model = factory()
    except Exception as error:
        raise InputError(f"{spec!r} must work without arguments; it raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def dummy_batch(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, Any]:
    """A batch of zeros on the CPU with labels, for text models and for image classifiers.

    Args:
        model: Its `forward` must take `input_ids` or `pixel_values`.
        batch_size: Samples.
        seq_len: Positions of each; not used for images, whose size is in the model's config.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is a positive whole number, got {value!r}")
    takes = inspect.signature(model.forward).parameters
    if "input_ids" in takes:
        ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()} if "labels" in takes else {"input_ids": ids}
    size = getattr(getattr(model, "config", None), "image_size", None)
    if "pixel_values" in takes and isinstance(size, int):
        channels = getattr(model.config, "num_channels", 3)
        labels = {"labels": torch.zeros(batch_size, dtype=torch.long)} if "labels" in takes else {}
        return {"pixel_values": torch.zeros(batch_size, channels, size, size), **labels}
    raise InputError(
        f"cannot make a batch for {type(model).__name__}: its forward takes {', '.join(takes) or 'nothing'}; "
        "call flopwatch.count_flops(model, batch) with a batch of your own"
    )
