"""Let one tool from PyPI count architectures; run by `rivals_venv.py` with the python those tools are installed in.

    python rivals.py deepspeed llama,mixtral

prints a JSON line per architecture: `{"architecture": "llama", "flops": {"deepspeed": 1, "deepspeed_macs": 2}}`, all of
them FLOPs of a whole training step, or `{"architecture": "llama", "failure": "..."}`.
"""

import contextlib
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import nn

from testbeds.architectures import BY_NAME, SEED, Architecture, Batch

SECONDS_PER_COUNT = 60
FLOPS_PER_MULTIPLY_ADD = 2
TRAINING_PER_FORWARD = 3

Flops = dict[str, int]
CountFn = Callable[[nn.Module, Batch], Flops]


class LossOfTensors(nn.Module):
    """Takes the batch's tensors by position and returns the loss: all that a TorchScript trace can take."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self.names = list(only_tensors(batch))
        self.others = {name: value for name, value in batch.items() if name not in self.names}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**dict(zip(self.names, tensors, strict=True)), **self.others).loss
        return loss


def only_tensors(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def fvcore() -> CountFn:
    from fvcore.nn import FlopCountAnalysis

    def count(model: nn.Module, batch: Batch) -> Flops:
        analysis = FlopCountAnalysis(LossOfTensors(model, batch), tuple(only_tensors(batch).values()))
        return {"fvcore": FLOPS_PER_MULTIPLY_ADD * TRAINING_PER_FORWARD * int(analysis.total())}

    return count


def calflops() -> CountFn:
    from calflops import calculate_flops

    def count(model: nn.Module, batch: Batch) -> Flops:
        options = {"include_backPropagation": True, "print_results": False, "output_as_string": False}
        # It calls .to(device) on every argument, so CLIP's `return_loss=True` is left out: it changes no product.
        flops, macs, _ = calculate_flops(model, kwargs=only_tensors(batch), **options)
        return {"calflops": int(flops), "calflops_macs": FLOPS_PER_MULTIPLY_ADD * int(macs)}

    return count


def ptflops() -> CountFn:
    from ptflops import get_model_complexity_info

    def count(model: nn.Module, batch: Batch) -> Flops:
        options: dict[str, Any] = {"backend": "aten", "as_strings": False, "print_per_layer_stat": False}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            macs, _ = get_model_complexity_info(model, (1,), input_constructor=lambda _: batch, **options)
        if macs is None:  # it prints its error and returns None
            raise RuntimeError(" ".join(printed.getvalue().split()))
        return {"ptflops": FLOPS_PER_MULTIPLY_ADD * TRAINING_PER_FORWARD * int(macs)}

    return count


def deepspeed() -> CountFn:
    from deepspeed.profiling.flops_profiler import get_model_profile

    def count(model: nn.Module, batch: Batch) -> Flops:
        flops, macs, _ = get_model_profile(model, kwargs=batch, print_profile=False, as_string=False)
        return {
            "deepspeed": TRAINING_PER_FORWARD * int(flops),
            "deepspeed_macs": FLOPS_PER_MULTIPLY_ADD * TRAINING_PER_FORWARD * int(macs),
        }

    return count


def mfu_tracker() -> CountFn:
    from mfu_tracker import profile_flops

    return lambda model, batch: {"mfu_tracker": int(profile_flops(model, kwargs=batch))}


LOADERS: dict[str, Callable[[], CountFn]] = {
    "fvcore": fvcore,
    "calflops": calflops,
    "ptflops": ptflops,
    "deepspeed": deepspeed,
    "mfu_tracker": mfu_tracker,
}


def count_apart(count: CountFn, architecture: Architecture, size: tuple[int, int]) -> dict[str, Any]:
    """Count in a forked process: it may crash or hang, and DeepSpeed leaves torch patched after its first profile."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_count_and_send, args=(sender, count, architecture, size))
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS_PER_COUNT):
            answer: dict[str, Any] = receiver.recv()
            return answer
        return {"failure": f"no answer within {SECONDS_PER_COUNT} s"}
    except EOFError:
        process.join()
        return {"failure": f"its process died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _count_and_send(sender: Connection, count: CountFn, architecture: Architecture, size: tuple[int, int]) -> None:
    try:
        model, batch = architecture.build(), architecture.batch(*size)
        torch.manual_seed(SEED)
        sender.send({"flops": count(model, batch)})
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        sender.send({"failure": f"{type(error).__name__}: {first_line}"})


def main() -> None:
    tool, names, batch_size, seq_len = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the tools print on import and while they count; stdout is for the answers
    torch.set_num_threads(1)  # a forked process has none of its parent's threads and would wait for them
    count = LOADERS[tool]()
    for name in names.split(","):
        architecture = BY_NAME[name]
        getattr(transformers, architecture.model_class)  # imported once here, not in every forked process
        answer = count_apart(count, architecture, (int(batch_size), int(seq_len)))
        print(json.dumps({"architecture": name, **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
