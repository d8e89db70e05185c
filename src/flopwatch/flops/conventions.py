"""The FLOPs of a step as publishers of performance tables count them, beside our own.

A publisher computes the FLOPs of a training step from the sizes of the model, and leaves some parts out. Here the same
figure comes from our count of the model: by its kind of attention, without the routers of experts where the publisher
has no term for them, and with the parameters that are in no product where the publisher counts 6 FLOPs for each. All of
them count every position of the batch, and nothing that is run again. Where a model has parts that a convention does
not define, there is a reason in place of a figure.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import read_shape
from flopwatch.flops.formulas.attention import MASK_NOT_READABLE, SCORES_MAY_MASK
from flopwatch.flops.methods import count_as_is
from flopwatch.flops.tracing.counter import UNMASKED_PRODUCTS
from flopwatch.flops.tracing.passes import CountOptions, LossFn, MethodChoice
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.records.flops import AttentionConvention, ConventionFlops, FlopCount

MoreParameters = Literal["none", "vectors", "all"]


@dataclass(frozen=True, slots=True)
class Convention:
    """What a publisher counts.

    Attributes:
        has_routers: Whether the products that choose the experts of a token count.
        is_for_experts: Whether it defines models of which a token uses only some parameters.
        more_parameters: Which parameters count 6 FLOPs per token although they are in no product: `vectors` are biases
            and the weights of norms, `all` includes tables of embeddings.
    """

    name: str
    attention: AttentionConvention
    has_routers: bool
    is_for_experts: bool
    more_parameters: MoreParameters
    source: str


CONVENTIONS = {
    each.name: each
    for each in (
        Convention(
            *("megatron", "causal", False, True, "none"),
            "Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (0494433b); Megatron-LM, "
            "megatron/training/training.py; NeMo Automodel, components/utils/flops_utils.py",
        ),
        Convention(
            *("maxtext", "causal", True, True, "none"),
            "MaxText, calculate_tflops_training_per_device in maxtext_utils.py since its pull request 1988",
        ),
        Convention(*("torchtitan", "full", True, True, "vectors"), "torchtitan, torchtitan/models/utils.py (b5bcd76c)"),
        Convention(
            *("palm", "full", True, False, "vectors"), "PaLM, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T per token"
        ),
        Convention(
            *("llm-foundry", "full", True, False, "all"), "llm-foundry, scripts/train/benchmarking/README.md (c90b9b31)"
        ),
    )
}

_OF_TRANSFORMERS = re.compile(r"^(addbmm|addmm|baddbmm|bmm|mm)$|attention|attn|grouped_mm|linear")
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def flops_by_convention(
    model: nn.Module, batch: Any, convention: str, *, method: MethodChoice = "auto", loss_fn: LossFn | None = None
) -> ConventionFlops:
    """Return the FLOPs of a training step as a publisher counts them, to compare an MFU with a published one.

    Args:
        model: A decoder for text, all of whose parameters are trained. It may be on the meta device.
        batch: The batch, as for `count_flops`.
        convention: `megatron` (Megatron-LM, Megatron-Bridge, NeMo Automodel: the causal half of attention, no routers),
            `maxtext` (the causal half, with routers), `torchtitan` and `palm` (all pairs of positions, 6 FLOPs for
            every parameter but the table of embeddings) or `llm-foundry` (all pairs, 6 FLOPs for every parameter).
        method: How the model is counted, as for `count_flops`.
        loss_fn: Computes the loss from the model's output; needed if the model does not return a loss.

    Returns:
        The FLOPs, or the reason why the convention does not define them for this model.
    """
    if convention not in CONVENTIONS:
        raise InputError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
    chosen = CONVENTIONS[convention]
    model = unwrap(model)
    reason = _why_not_trained_as_a_whole(model)
    if reason is None:
        full = count_as_is(model, batch, CountOptions("full", loss_fn, method=method))
        causal = count_as_is(model, batch, CountOptions("causal", loss_fn, method=method))
        reason = _why_not_defined(chosen, model, batch, causal) or _why_not_attention(chosen, full, causal)
    if reason is not None:
        return ConventionFlops(chosen.name, None, chosen.attention, chosen.source, reason)
    flops = by_count(chosen, model, causal if chosen.attention == "causal" else full, read_shape(batch))
    return ConventionFlops(chosen.name, flops, chosen.attention, chosen.source)


def by_count(chosen: Convention, model: nn.Module, count: FlopCount, shape: tuple[int, int | None]) -> int:
    """Return the convention's FLOPs from a count with its kind of attention; `shape` is the batch's."""
    flops = count.forward_flops + count.backward_flops
    if not chosen.has_routers:
        flops -= sum(count.by_module[path].forward + count.by_module[path].backward for path in routers(model, count))
    return flops + 6 * (shape[0] * (shape[1] or 1)) * parameters_in_no_product(chosen, model)


def routers(model: nn.Module, count: FlopCount) -> list[str]:
    """The modules of a count that choose experts: their weight has a row for each expert.

    A module beside one of them whose weight has one row weighs the shared expert.
    """
    experts = number_of_experts(model)
    rows = {path: _rows(module) for path, module in model.named_modules() if path in count.by_module}
    found = [path for path in rows if experts and rows[path] == experts]
    beside = {path.rpartition(".")[0] for path in found}
    return found + [path for path in rows if rows[path] == 1 and path.rpartition(".")[0] in beside]


def _rows(module: nn.Module) -> int | None:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight.shape[0] if weight is not None and weight.dim() == 2 else None


def number_of_experts(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    for owner in (config, *getattr(config, "__dict__", {}).values()):
        for name in _NUMBERS_OF_EXPERTS:
            if isinstance(number := getattr(owner, name, None), int) and number > 1:
                return number
    return 0


def parameters_in_no_product(chosen: Convention, model: nn.Module) -> int:
    """How many parameters count 6 FLOPs per token although no product uses them."""
    if chosen.more_parameters == "none":
        return 0
    tables: dict[bool, set[int]] = {True: set(), False: set()}
    for module in model.modules() if chosen.more_parameters == "all" else ():
        tables[isinstance(module, nn.Embedding)].update(map(id, module.parameters(recurse=False)))
    # A table that is the weight of the output too is in a product.
    alone = tables[True] - tables[False]
    return sum(each.numel() for each in model.parameters() if each.dim() < 2 or id(each) in alone)


def _why_not_trained_as_a_whole(model: nn.Module) -> str | None:
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    if frozen:
        return f"{frozen:,} parameters are not trained, and the convention counts a training of all parameters"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "the convention is defined for decoders, and this model has an encoder too"
    return None


def _why_not_defined(chosen: Convention, model: nn.Module, batch: Any, count: FlopCount) -> str | None:
    if count.method not in ("trace", "step") or count.uncounted:
        return "the model's own FLOPs are not known exactly"
    other = [op for op, flops in count.by_op.items() if flops.total and not _OF_TRANSFORMERS.search(op)]
    if other:
        return f"the convention defines products of matrices and attention, and the model also runs {', '.join(other)}"
    if read_shape(batch).seq_len is None:
        return "the convention is defined for sequences of tokens, and the batch has none"
    has_experts = bool(number_of_experts(model)) or any("grouped_mm" in op for op in count.by_op)
    if has_experts and not chosen.is_for_experts:
        return "the convention does not define models with experts, of which a token uses only some parameters"
    if has_experts and not chosen.has_routers and not routers(model, count):
        return "the convention leaves out routers, and it could not be found out which modules of the model are"
    return None


def _why_not_attention(chosen: Convention, full: FlopCount, causal: FlopCount) -> str | None:
    is_halved = chosen.attention == "causal"
    if is_halved and causal.attention != "causal":
        return "the convention counts the unmasked half of attention, and no mask of attention could be read"
    # Linear attention and experts that all tokens run through are plain products too.
    if UNMASKED_PRODUCTS in causal.notes:
        return (
            "it is not known which products of the model are attention (it is known of attention that runs as one op)"
        )
    if is_halved and not {MASK_NOT_READABLE, SCORES_MAY_MASK}.isdisjoint(causal.notes):
        return "the convention counts the unmasked half of attention, and not all masks of attention could be read"
    if is_halved and full.forward_flops == causal.forward_flops:
        return "the convention counts the causal half of attention, and the attention of this model has no mask"
    return None
