"""Opacus, loaded without its side effects."""

import logging
import warnings
from dataclasses import dataclass
from typing import Any

from flopwatch.optional import require


@dataclass(frozen=True, slots=True)
class OpacusParts:
    """The classes of Opacus the trainers are made of.

    `PrivacyEngine` is not among them: all it adds here is a data loader with a random batch size, which a sweep must
    not have, and an accountant; and it drops `use_ghost_clipping` without a word (Opacus 1.6).
    """

    hooks_module: Any
    hooks_optimizer: Any
    two_pass_module: Any
    two_pass_optimizer: Any
    two_pass_loss: Any


def clip_and_keep(optimizer: Any) -> None:
    """Add this micro-batch's clipped gradients to those kept; noise and update come with the last one.

    What `opacus.utils.batch_memory_manager.BatchMemoryManager` does for a loader.
    """
    optimizer.signal_skip_step(do_skip=True)
    optimizer.step()
    optimizer.zero_grad()


def load_opacus() -> OpacusParts:
    root = logging.getLogger()
    handlers = list(root.handlers)
    modules = require("opacus.grad_sample", "dp")
    optimizers = require("opacus.optimizers", "dp")
    clipping = require("opacus.utils.fast_gradient_clipping_utils", "dp")
    # Importing Opacus calls logging.basicConfig: the program's log would change its form.
    root.handlers[:] = handlers
    # An embedding's input has no gradient, so torch says this in every backward pass of every language model. The
    # hooks read the gradients of outputs only.
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
    return OpacusParts(
        modules.GradSampleModule,
        optimizers.DPOptimizer,
        modules.GradSampleModuleFastGradientClipping,
        optimizers.DPOptimizerFastGradientClipping,
        clipping.DPTensorFastGradientClipping,
    )
