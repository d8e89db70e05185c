"""What a tool does to a training besides watching it: compared with the same steps without it."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from overhead.torch_patches import TorchPatches
from overhead.training_loop import Contender, Size, Training, described

STEPS = 13
"""Every tenth step is measured twice, and some follow."""
LAST_STEPS = 2

Make = Callable[[Training], Contender]


def harm(size: Size, make: Make, *, is_compiled: bool) -> Mapping[str, Any]:
    """Differences after the same steps; `failure` when the tool stopped the training."""
    before = _compiled_run(Training(size), None) if is_compiled else _plain_run(Training(size), None)
    try:
        after = _compiled_run(Training(size), make) if is_compiled else _plain_run(Training(size), make)
    except Exception as error:
        return {"failure": described(error)}
    return {"bare": before, "watched": after}


def _plain_run(training: Training, make: Make | None) -> Mapping[str, Any]:
    patches = TorchPatches()
    contender = make(training) if make else Contender(lambda number: training.step())
    for number in range(STEPS):
        contender.step(number)
    contender.close()
    return {
        "parameters": _fingerprint(training.model),
        "is_training": training.model.training,
        "hooks": sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) for module in training.model.modules()
        ),
        "patched": patches.names(),
    }


def _compiled_run(training: Training, make: Make | None) -> Mapping[str, Any]:
    compiler = _CountingCompiler()
    torch._dynamo.reset()
    training.model = torch.compile(training.model, backend=compiler)  # type: ignore[assignment]
    contender = make(training) if make else Contender(lambda number: training.step())
    for number in range(STEPS - LAST_STEPS):
        contender.step(number)
    calls = compiler.calls
    for number in range(STEPS - LAST_STEPS, STEPS):
        contender.step(number)
    return {"graphs": compiler.graphs, "calls_of_the_last_steps": compiler.calls - calls}


class _CountingCompiler:
    """Runs graphs as they are; counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph(*arguments)

        return run


def _fingerprint(model: nn.Module) -> str:
    """Equal only for parameters that are equal bit by bit, but for an accident of 1 in 2^64."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
