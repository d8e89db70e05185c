"""All names of Opacus that flopwatch uses, most of them undocumented, and workarounds for Opacus's side effects.

Checked with Opacus 1.6.0. If another version lacks a name, the trial ends with a MissingDependencyError
that says so. This module imports Opacus only when a function is called, and never imports torch.
"""

import logging
import warnings
from types import SimpleNamespace
from typing import Any

from flopwatch.errors import MissingDependencyError
from flopwatch.optional import require

CHECKED_VERSION = "1.6.0"

MISSING_GRADIENT_SIGNS = ("NoneType", "not initialized", "norm_sample")
"""Texts in the messages of Opacus's exceptions which mean that a trainable parameter got no gradient."""


_TRAINERS_USE = {
    "GradSampleModule": "opacus.grad_sample",
    "GradSampleModuleFastGradientClipping": "opacus.grad_sample",
    "DPOptimizer": "opacus.optimizers",
    "DPOptimizerFastGradientClipping": "opacus.optimizers",
    # The loss of two-pass clipping is exported nowhere else; its backward() runs both passes.
    "DPTensorFastGradientClipping": "opacus.utils.fast_gradient_clipping_utils",
}
"""The classes that the trainers use, and their modules.

`PrivacyEngine` is not used, because it adds a data loader with random batch sizes, which a sweep must not have, and
because it silently ignores `use_ghost_clipping`.
"""


def load_opacus() -> SimpleNamespace:
    """Import Opacus without its side effects, and return the classes that the trainers use."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    classes = SimpleNamespace(**{name: _name(module, name) for name, module in _TRAINERS_USE.items()})
    # Importing Opacus has called logging.basicConfig, so restore the log format of the whole program.
    root.handlers[:] = handlers
    # torch warns in every backward pass of a language model, because the input of an embedding has no gradient. The
    # hooks of Opacus do not read gradients of inputs, so the warning does not matter here.
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
    return classes


def has_ghost_norm(layer: object) -> bool:
    """Whether Opacus can compute the gradient norms of this layer's class without per-sample gradients.

    NORM_SAMPLERS is Opacus's undocumented table of these classes.
    """
    return type(layer) in _attribute(load_opacus().GradSampleModuleFastGradientClipping, "NORM_SAMPLERS")


def has_gradient_hook(layer: object) -> bool:
    """Whether Opacus has a formula for the per-sample gradients of this layer's class.

    GRAD_SAMPLERS is Opacus's undocumented table of these classes. For all other layers, Opacus computes per-sample
    gradients with functorch's vmap, which runs the layer a second time.
    """
    return type(layer) in _attribute(load_opacus().GradSampleModuleFastGradientClipping, "GRAD_SAMPLERS")


def clip_and_accumulate(optimizer: Any) -> None:
    """Clip the gradients of a micro-batch and add them up, without noise and without an update.

    Opacus's BatchMemoryManager does the same, but it needs a data loader, which a sweep does not have.
    """
    _attribute(optimizer, "signal_skip_step")(do_skip=True)
    optimizer.step()
    optimizer.zero_grad()


def without_sample_gradients(model: Any) -> list[str]:
    """The trainable parameters for which the last backward pass found neither per-sample gradients nor their norms.

    Opacus keeps these in undocumented attributes of the parameters.
    """
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and getattr(parameter, "grad_sample", None) is None
        and getattr(parameter, "_norm_sample", None) is None
    ]


def epsilon_spent(accountant: str, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Epsilon after `steps` equal steps. Setting the accountant's `history` is faster than recording each step."""
    ledger = _name("opacus.accountants", "create_accountant")(mechanism=accountant)
    _attribute(ledger, "history")
    ledger.history = [(noise_multiplier, sample_rate, steps)]
    return float(ledger.get_epsilon(delta=delta))


def prv_half_width(
    noise_multiplier: float, sample_rate: float, steps: int, epsilon_error: float, delta_error: float
) -> float:
    """Half the width of the grid that the PRV accountant would allocate. It decides how much memory the grid takes."""
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
            f"the installed version of Opacus has no {name}, which flopwatch needs ({error}); install the version that "
            f"flopwatch was checked with: pip install opacus=={CHECKED_VERSION}"
        ) from error
