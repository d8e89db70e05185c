"""Every name of Opacus that flopwatch uses outside its documented API, and the side effects it works around.

Checked with Opacus 1.6.0. A name that another version does not have raises MissingDependencyError, which says so; the
trial, or the preflight, then ends with that message. Loads Opacus only when a function is called, and never torch.
"""

import logging
import warnings
from dataclasses import dataclass
from typing import Any

from flopwatch.errors import MissingDependencyError
from flopwatch.optional import require

CHECKED_VERSION = "1.6.0"

MISSING_GRADIENT_SIGNS = ("NoneType", "not initialized", "_norm_sample")
"""Parts of the messages that Opacus raises if a trainable parameter got no gradient. A message without them is shown
unchanged.
"""


@dataclass(frozen=True, slots=True)
class OpacusParts:
    """The classes of Opacus that the trainers are made of.

    `PrivacyEngine` is not used. It would add a data loader with random batch sizes, which a sweep must not have, and an
    accountant, and it silently ignores `use_ghost_clipping`.
    """

    hooks_module: Any
    hooks_optimizer: Any
    two_pass_module: Any
    two_pass_optimizer: Any
    two_pass_loss: Any


def load_opacus() -> OpacusParts:
    root = logging.getLogger()
    handlers = list(root.handlers)
    # The loss of two-pass clipping is exported nowhere else; its backward() runs both passes.
    two_pass_loss = _name("opacus.utils.fast_gradient_clipping_utils", "DPTensorFastGradientClipping")
    parts = OpacusParts(
        _name("opacus.grad_sample", "GradSampleModule"),
        _name("opacus.optimizers", "DPOptimizer"),
        _name("opacus.grad_sample", "GradSampleModuleFastGradientClipping"),
        _name("opacus.optimizers", "DPOptimizerFastGradientClipping"),
        two_pass_loss,
    )
    # Importing Opacus calls logging.basicConfig, which would change the log format of the whole program.
    root.handlers[:] = handlers
    # torch warns in every backward pass of a language model, because the input of an embedding has no gradient. The
    # hooks of Opacus read the gradients of outputs only, so the warning does not apply.
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
    return parts


def has_ghost_norm(layer: object) -> bool:
    """Whether Opacus computes gradient norms of this class without per-sample gradients. Undocumented class table."""
    return type(layer) in _attribute(load_opacus().two_pass_module, "NORM_SAMPLERS")


def has_gradient_hook(layer: object) -> bool:
    """Whether Opacus has a formula for this class's per-sample gradients. Undocumented class table; for a class that is
    not in it, Opacus runs the layer again under functorch's vmap.
    """
    return type(layer) in _attribute(load_opacus().two_pass_module, "GRAD_SAMPLERS")


def clip_and_accumulate(optimizer: Any) -> None:
    """Clip the gradients of a micro-batch and add them up, without noise and without an update.

    Done as `opacus.utils.batch_memory_manager.BatchMemoryManager` does it for a data loader; a sweep has none.
    """
    _attribute(optimizer, "signal_skip_step")(do_skip=True)
    optimizer.step()
    optimizer.zero_grad()


def finish_gradients(optimizer: Any) -> None:
    """Clip, add noise and scale, so that `p.grad` holds what the inner optimizer would get, without its step."""
    _attribute(optimizer, "pre_step")()


def epsilon_spent(accountant: str, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Epsilon after so many equal steps. Sets the accountant's `history` in place of stepping it `steps` times."""
    ledger = _name("opacus.accountants", "create_accountant")(mechanism=accountant)
    _attribute(ledger, "history")
    ledger.history = [(noise_multiplier, sample_rate, steps)]
    return float(ledger.get_epsilon(delta=delta))


def prv_half_width(
    noise_multiplier: float, sample_rate: float, steps: int, epsilon_error: float, delta_error: float
) -> float:
    """Half the width of the grid that the PRV accountant would allocate: the only way to know its memory beforehand."""
    random_variable = _name("opacus.accountants.analysis.prv", "PoissonSubsampledGaussianPRV")
    domain_size = _name("opacus.accountants.analysis.prv", "compute_safe_domain_size")
    return float(
        domain_size(
            prvs=[random_variable(sample_rate, noise_multiplier)],
            max_self_compositions=[steps],
            eps_error=epsilon_error,
            delta_error=delta_error,
        )
    )


def _name(module: str, name: str) -> Any:
    return _attribute(require(module, "dp"), name)


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise MissingDependencyError(
            f"the installed version of Opacus has no {name} ({error}), which flopwatch needs; install the version it "
            f"was checked with: pip install opacus=={CHECKED_VERSION}"
        ) from error
