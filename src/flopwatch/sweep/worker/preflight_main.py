"""Tries each trainer on a tiny copy of each model: `python -m flopwatch.sweep.worker.preflight_main SWEEP_FOLDER`.

A tiny copy is a model of the same architecture that is so small that a step takes less than a second on a CPU.
"""

import copy
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopwatch.decode import read_record
from flopwatch.errors import FlopwatchError, InputError, MissingDependencyError, UnsupportedError
from flopwatch.files import append_line, read_json
from flopwatch.models.load import Decoder, ResNet, load_model
from flopwatch.models.presets import PRESETS, Preset, config_file, image_preset, is_config
from flopwatch.records.privacy import Privacy
from flopwatch.records.trial import LABELS, PRIVATE, TrialSpec
from flopwatch.sweep.preflight import PROGRESS, REQUEST, PreflightResult, result_for
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.builtin import enable_checkpointing, forward_inputs, own_loss
from flopwatch.sweep.trainers.parity import parity, sample_gradients, without_dropout
from flopwatch.sweep.trainers.protocol import Trainer, TrainerSettings, declared_privacy, load_trainer
from flopwatch.sweep.trainers.unsupported import check_supported, explain_failure, layer_paths
from flopwatch.sweep.worker.exception_outcome import result_or_error
from flopwatch.sweep.worker.step_cost import count_plain
from flopwatch.text import cut, first_line

_BATCH_SIZE, _SEQ_LEN = 3, 8
"""Batch size and length differ from each other and from the copies' sizes, so that swapped dimensions raise errors."""

_SAME_GRADIENTS = 1e-2
"""Gradients with a smaller relative difference count as equal. Rounding in fp32 causes differences below 1e-5, and
a gradient norm that is computed without one of the samples causes differences above 1e-2.
"""


def main(folder: str) -> None:
    torch.set_num_threads(1)
    sweep = Path(folder)
    for content in read_json(sweep / REQUEST) or ():
        append_line(sweep / PROGRESS, preflight(read_record(TrialSpec, content)).to_json())
        gc.collect()


def preflight(spec: TrialSpec) -> PreflightResult:
    begin, result = time.perf_counter(), result_for(spec)
    for stage in (_with_facts, _try_trainer):
        found, error = result_or_error(partial(stage, result, spec))
        result = found or result
        if isinstance(error, InputError | MissingDependencyError):  # the trial would fail with the same error
            is_mistake = not isinstance(error, UnsupportedError)
            result = replace(result, supported=False, is_mistake=is_mistake, reason=cut(str(error), 1000))
        elif error is not None:
            result = replace(result, tried=False, reason=f"not tried: {_said(error)}")
        if error is not None:
            break
    return replace(result, seconds=time.perf_counter() - begin)


def _with_facts(result: PreflightResult, spec: TrialSpec) -> PreflightResult:
    full = load_model(spec.model)
    return replace(
        result,
        parameters=_parameters(full),
        model_flops=_model_flops(spec.model, spec.batch_size, spec.seq_len, spec.batch),
        layers=layer_paths(spec.trainer, full) if spec.trainer in PRIVATE else {},
    )


@cache
def _model_flops(model: str, batch_size: int, seq_len: int, function: str | None) -> int | None:
    """The FLOPs of a standard step; cached, because they are the same for all trainers. None if they are unknown."""
    full = load_model(model)
    try:
        return count_plain(full, trial_batch(full, batch_size, seq_len, 0, "cpu", function)).model_flops
    except FlopwatchError:
        return None


def _try_trainer(result: PreflightResult, spec: TrialSpec) -> PreflightResult:
    if spec.trainer in PRIVATE:
        full = load_model(spec.model)
        if spec.checkpointing:
            enable_checkpointing(full)
        check_supported(spec.trainer, full)
    problem = "no copy of the model is small enough for the preflight"
    for tiny in tiny_copies(spec.model):
        if spec.checkpointing:
            enable_checkpointing(tiny)
        plain = spec if spec.trainer in LABELS else replace(spec, options={})
        instance, error = result_or_error(partial(_run_step, "standard", tiny, plain), UnsupportedError)
        if instance is not None:
            return _try_on(tiny, result, spec)
        # The sizes of this copy may be invalid, so the next one is tried.
        problem = f"a standard training step of a tiny copy failed: {_said(error)}"
    return replace(result, tried=False, reason=f"not tried: {problem}")


def _try_on(tiny: nn.Module, result: PreflightResult, spec: TrialSpec) -> PreflightResult:
    if spec.trainer == "standard":
        return result
    instance, error = result_or_error(partial(_run_step, spec.trainer, tiny, spec), FlopwatchError)
    if error is not None:
        if spec.trainer in PRIVATE:
            raise UnsupportedError(explain_failure(spec.trainer, _idle_parameters(tiny, spec), error)) from error
        raise error
    if spec.trainer in PRIVATE:
        return _compared(tiny, result, spec)
    found = getattr(instance, "privacy", None)
    if found is None or isinstance(found, Privacy):
        return result
    # An attribute of another type is no declaration, but may have been meant as one.
    is_what = f"a {type(found).__name__}, not a flopwatch.sweep.Privacy"
    reason = f"the trainer runs, but is not taken as private: its attribute `privacy` is {is_what}"
    return replace(result, reason=reason)


def _tiny_batch(model: nn.Module, spec: TrialSpec) -> dict[str, Any]:
    return trial_batch(model, _BATCH_SIZE, _SEQ_LEN, 0, "cpu", spec.batch)


def _run_step(trainer: str, tiny: nn.Module, spec: TrialSpec) -> Trainer:
    model = copy.deepcopy(tiny)
    batch = _tiny_batch(model, spec)
    settings = TrainerSettings(_BATCH_SIZE, torch.device("cpu"), spec.dtype, spec.options)
    instance = load_trainer(trainer)(model, settings)
    declared_privacy(instance)  # raises if a declared value cannot be used
    instance.backward(instance.forward(batch))
    _check_finite("gradients", (p.grad for p in model.parameters() if p.grad is not None))
    instance.update()
    _check_finite("weights", model.parameters())
    return instance


def _idle_parameters(tiny: nn.Module, spec: TrialSpec) -> list[str]:
    batch = _tiny_batch(tiny, spec)
    names, parameters = zip(*((n, p) for n, p in tiny.named_parameters() if p.requires_grad), strict=True)
    loss = own_loss(tiny, tiny(**forward_inputs(tiny, batch)), batch)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


def _check_finite(what: str, tensors: Iterable[torch.Tensor]) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise UnsupportedError(f"the {what} of a tiny copy of the model are not finite after one step")


def _compared(tiny: nn.Module, result: PreflightResult, spec: TrialSpec) -> PreflightResult:
    """Compare the clipped gradients with those of a loop over the samples, because a step can run yet clip wrongly."""
    batch = _tiny_batch(tiny, spec)
    found, error = result_or_error(partial(parity, tiny, batch, trainers=[result.trainer]))
    if found is None:
        return replace(result, reason=f"the trainer runs, but its gradients were not checked: {_said(error)}")
    difference = found[result.trainer]
    if difference <= _SAME_GRADIENTS:
        return replace(result, difference=difference)
    plain = without_dropout(copy.deepcopy(tiny))
    first, second = sample_gradients(plain, batch)[0], sample_gradients(plain, batch)[0]
    if any(not torch.allclose(first[name], second[name]) for name in first):
        return replace(result, reason="the trainer runs; its gradients were not checked, because the model is random")
    raise UnsupportedError(
        f"the trainer runs, but its clipped gradients differ by {difference:.1%} from those of a loop over the "
        "samples: Opacus does not separate the samples of this model correctly, so the training would not be private; "
        "use another trainer or model"
    )


def _said(error: object) -> str:
    return f"{type(error).__name__}: {first_line(error, 1000)}"


# Tiny copies

MOST_PARAMETERS = 20_000_000
"""Larger models are not run in the preflight, because a step would take seconds and hundreds of megabytes."""

# Sizes of the tiny copies of models, and what these sizes are called in the configs of transformers.
_HEADS, _HEAD_WIDTH, _VOCABULARY, _PATCH = 4, 8, 96, 4
_CHANNELS, _SIDE = 8, 32
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_INNER = (
    *("intermediate_size", "moe_intermediate_size", "n_inner", "d_ff", "ffn_dim"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
)
_ATTENTION_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_NARROW = {
    **dict.fromkeys(_ATTENTION_HEADS, _HEADS),
    **dict.fromkeys(_INNER, 2 * _HEADS * _HEAD_WIDTH),
    **dict.fromkeys(("head_dim", "d_kv"), _HEAD_WIDTH),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "cls_token_id", "sep_token_id")


def tiny_copies(model: str) -> Iterator[nn.Module]:
    """Copies of the model on the CPU, the smallest first; none if all are too large.

    A smaller config may be invalid, so the caller takes the first copy on which a standard training step succeeds. A
    model of a `package.module:function` is not made smaller.
    """
    if (preset := PRESETS.get(model)) is not None:
        heads = min(preset.heads, _HEADS)
        sizes = Preset(min(preset.vocab_size, _VOCABULARY), heads * _HEAD_WIDTH, min(preset.layers, 2), heads)
        yield Decoder(sizes).train()
    elif (images := image_preset(model)) is not None:
        # Fewer blocks and channels, but all stages and classes, so that a user's labels stay valid.
        widths = tuple(_CHANNELS * 2**stage for stage in range(len(images.widths)))
        yield ResNet(replace(images, image_size=_SIDE, widths=widths, blocks_per_stage=1)).train()
    elif is_config(model):
        settings = json.loads(config_file(model).read_text(encoding="utf-8"))
        for tried in (smaller(settings, is_narrow=True), smaller(settings, is_narrow=False), settings):
            copy, _ = result_or_error(partial(_built, tried))
            if copy is not None:
                yield copy
    elif _parameters(load_model(model)) <= MOST_PARAMETERS:
        yield load_model(model, device="cpu").train()


def smaller(settings: dict[str, Any], *, is_narrow: bool) -> dict[str, Any]:
    """The config with a small vocabulary and two layers, or as many as it needs to have one of each layer type.

    If `is_narrow`, it also has few and narrow heads, few experts and small images.
    """
    small: dict[str, Any] = {
        key: smaller(value, is_narrow=is_narrow) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in settings.items()
    }
    count, kinds = 2, settings.get("layer_types")
    if isinstance(kinds, list):
        count = max([2, *(kinds.index(kind) + 1 for kind in kinds)])
        small["layer_types"] = kinds[:count]
    limits = {**dict.fromkeys(_LAYERS, count), "vocab_size": _VOCABULARY}
    if is_narrow:
        heads: int = next((small[name] for name in _ATTENTION_HEADS if isinstance(small.get(name), int)), _HEADS)
        groups = small.get("num_key_value_heads")
        if isinstance(groups, int):
            small["num_key_value_heads"] = max(1, min(heads, _HEADS) * groups // heads)
        if isinstance(small.get("image_size"), int) and isinstance(small.get("patch_size"), int):
            small["image_size"], small["patch_size"] = 4 * _PATCH, _PATCH
        limits |= {**_NARROW, **dict.fromkeys(_WIDTH, min(heads, _HEADS) * _HEAD_WIDTH)}
    for name, most in limits.items():
        if isinstance(small.get(name), int):
            small[name] = min(small[name], most)
    for name in _TOKENS:
        if isinstance(small.get(name), int) and small[name] >= _VOCABULARY:
            small[name] = None if name != "decoder_start_token_id" else 0
    return small


def _built(settings: dict[str, Any]) -> nn.Module | None:
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(settings))
        if _parameters(load_model(str(file))) > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        return load_model(str(file), device="cpu")


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main(sys.argv[1])
