"""Tries pairs of trainer and model on tiny copies: `python -m flopwatch.sweep.preflight_worker SWEEP_FOLDER`."""

import copy
import functools
import gc
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopwatch.errors import FlopwatchError, InputError, MissingDependencyError, UnsupportedError
from flopwatch.models.load import load_model
from flopwatch.plain_text import cut
from flopwatch.sweep.preflight import REQUEST, PreflightResult, note_begun, note_found
from flopwatch.sweep.step_cost import count_plain
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.checkpointing import enable_checkpointing
from flopwatch.sweep.trainers.layer_paths import layer_paths
from flopwatch.sweep.trainers.load import load_trainer
from flopwatch.sweep.trainers.losses import forward_inputs, own_loss
from flopwatch.sweep.trainers.names import LABELS, PRIVATE
from flopwatch.sweep.trainers.parity import parity, sample_gradients, without_dropout
from flopwatch.sweep.trainers.protocol import TrainerSettings
from flopwatch.sweep.trainers.tiny_copy import tiny_copies
from flopwatch.sweep.trainers.unsupported import check_supported, explain_failure
from flopwatch.sweep.worker_exception import message_of
from flopwatch.trial_files import read_json

_BATCH_SIZE, _SEQ_LEN = 3, 8
"""Different from each other and from the copies' sizes, so that no dimension is taken for another by chance."""

_SAME_GRADIENTS = 1e-2
"""Rounding is below 1e-5 in fp32; a sample left out of a norm is above this."""

Request = Mapping[str, Any]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    sweep = Path(folder)
    for request in read_json(sweep / REQUEST) or ():
        note_begun(sweep, request)
        note_found(sweep, preflight(request))
        gc.collect()


def preflight(request: Request) -> PreflightResult:
    """Look at the full model on the meta device, then run a step of a tiny copy."""
    begin = time.perf_counter()
    pair = {name: request[name] for name in ("trainer", "model", "checkpointing", "dtype")}
    result = PreflightResult(**pair, supported=True, batch_size=request["batch_size"], seq_len=request["seq_len"])
    try:
        result = _with_facts(result, request.get("batch"))
        result = _tried(result, request)
    except (InputError, MissingDependencyError) as error:  # the trial would say the same, after taking a slot
        is_mistake = not isinstance(error, UnsupportedError)
        result = replace(result, supported=False, is_mistake=is_mistake, reason=cut(message_of(error), 1000))
    except Exception as error:  # a user's trainer or model may raise anything; that must not cost the other pairs
        result = replace(result, tried=False, reason=f"not tried: {_said(error)}")
    return replace(result, seconds=time.perf_counter() - begin)


def _with_facts(result: PreflightResult, function: str | None) -> PreflightResult:
    """What the full model says of itself, without weights."""
    full = load_model(result.model)
    result = replace(result, parameters=sum(parameter.numel() for parameter in full.parameters()))
    if result.batch_size and result.seq_len:
        flops = _model_flops(result.model, result.batch_size, result.seq_len, function)
        result = replace(result, model_flops=flops)
    if result.trainer in PRIVATE:
        result = replace(result, layers=layer_paths(result.trainer, full))
    return result


@functools.cache
def _model_flops(model: str, batch_size: int, seq_len: int, function: str | None) -> int | None:
    """The same whichever trainer runs, and with checkpointing too."""
    full = load_model(model)
    try:
        return count_plain(full, trial_batch(full, batch_size, seq_len, 0, "cpu", function), "full").model_flops
    except FlopwatchError:
        return None


def _tried(result: PreflightResult, request: Request) -> PreflightResult:
    if result.trainer in PRIVATE:
        full = load_model(result.model)
        if result.checkpointing:
            enable_checkpointing(full)
        check_supported(result.trainer, full)
    is_ours = result.trainer in LABELS
    problem = "no copy of the model is small enough to be run here"
    for tiny in tiny_copies(result.model):
        if result.checkpointing:
            enable_checkpointing(tiny)
        try:
            _run_step("standard", copy.deepcopy(tiny), request if is_ours else {**request, "options": {}})
        except UnsupportedError:
            raise
        except Exception as error:  # a config that was shrunk wrongly
            problem = f"an ordinary step of a tiny copy failed: {_said(error)}"
            continue
        return _tried_on(tiny, result, request)
    return replace(result, tried=False, reason=f"not tried: {problem}")


def _tried_on(tiny: nn.Module, result: PreflightResult, request: Request) -> PreflightResult:
    """Ordinary training works on this copy; now the trainer in question."""
    if result.trainer == "standard":
        return result
    try:
        _run_step(result.trainer, copy.deepcopy(tiny), request)
    except FlopwatchError:
        raise
    except Exception as error:
        if result.trainer in PRIVATE:
            raise UnsupportedError(explain_failure(result.trainer, _idle_parameters(tiny, request), error)) from error
        raise
    return _compared(tiny, result, request) if result.trainer in PRIVATE else result


def _run_step(trainer: str, model: nn.Module, request: Request) -> None:
    device = torch.device("cpu")
    batch = trial_batch(model, _BATCH_SIZE, _SEQ_LEN, 0, device, request.get("batch"))
    settings = TrainerSettings(_BATCH_SIZE, device, request["dtype"], request["options"])
    instance = load_trainer(trainer)(model, settings)
    instance.backward(instance.forward(batch))
    _check_finite("gradients", (p.grad for p in model.parameters() if p.grad is not None))
    instance.update()
    _check_finite("weights", model.parameters())


def _idle_parameters(tiny: nn.Module, request: Request) -> list[str]:
    batch = trial_batch(tiny, _BATCH_SIZE, _SEQ_LEN, 0, "cpu", request.get("batch"))
    names, parameters = zip(*((n, p) for n, p in tiny.named_parameters() if p.requires_grad), strict=True)
    loss = own_loss(tiny, tiny(**forward_inputs(tiny, batch)), batch)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


def _check_finite(what: str, tensors: Iterable[torch.Tensor]) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise UnsupportedError(f"the {what} are not finite after one step of a tiny copy")


def _compared(tiny: nn.Module, result: PreflightResult, request: Request) -> PreflightResult:
    """A step that runs may still clip wrongly: hold it against a loop over the samples."""
    batch = trial_batch(tiny, _BATCH_SIZE, _SEQ_LEN, 0, "cpu", request.get("batch"))
    try:
        difference = parity(tiny, batch, trainers=[result.trainer])[result.trainer]
    except Exception as error:
        return replace(result, reason=f"runs, but was not compared with a loop over the samples: {_said(error)}")
    if difference <= _SAME_GRADIENTS:
        return replace(result, difference=difference)
    if _is_random(tiny, batch):
        return replace(result, reason="runs, but was not compared with a loop over the samples: the model draws lots")
    raise UnsupportedError(
        f"it runs, but its clipped gradients are {difference:.1%} away from a loop over the samples: Opacus does not "
        "see the samples of this model as they are, so neither clipping nor privacy would hold"
    )


def _is_random(tiny: nn.Module, batch: Mapping[str, Any]) -> bool:
    plain = without_dropout(copy.deepcopy(tiny))
    first, second = sample_gradients(plain, batch)[0], sample_gradients(plain, batch)[0]
    return any(not torch.allclose(first[name], second[name]) for name in first)


def _said(error: Exception) -> str:
    return cut(f"{type(error).__name__}: {(message_of(error).strip() or 'no message').splitlines()[0]}", 1000)


if __name__ == "__main__":
    main(sys.argv[1])
