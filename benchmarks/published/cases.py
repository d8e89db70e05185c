"""Says for each published row which model it is of, and by which convention its publisher counts, with the source.

A convention that the source states is `stated`; if the publisher's formula has a term that is not what the model
computes, and this term stands in place of ours, it is `own term`. If the text does not decide which convention a row
has, the one that was taken is `inferred`, whether it fits or not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flopwatch.flops.conventions import CONVENTIONS
from published.counts import Counts
from published.models import MODELS
from published.rows import Row

Group = Literal["stated", "own term", "inferred"]
FlopsPerToken = Callable[[Counts, int], float]

_BRIDGE = "Megatron-Bridge flop_utils.py (0494433b)"
_AUTOMODEL = "NeMo Automodel flops_utils.py (032a69ae)"


@dataclass(frozen=True, slots=True)
class Case:
    """How the FLOPs of a row come about.

    Attributes:
        says: What the publisher counts, with the source.
        flops_per_token: From the counts of models and the row's length.
        why_off: What is known about rows that are far off.
    """

    model: str
    convention: str
    group: Group
    says: str
    flops_per_token: FlopsPerToken
    why_off: str | None = None


@dataclass(frozen=True, slots=True)
class NotCompared:
    why: str


def case_of(row: Row) -> Case | NotCompared:
    if row.tokens_per_s is None:
        return NotCompared("FLOP/s are published without tokens per second")
    if row.published is None:
        return NotCompared("tokens per second are published without FLOP/s")
    by_source = {
        "Megatron-Bridge": _of_bridge,
        "Automodel": _of_automodel,
        "llm-foundry": _of_foundry,
        "torchtitan": _of_torchtitan,
        "MaxText": _of_maxtext,
    }
    return by_source[row.source](row)


def _plain(model: str, convention: str, group: Group, says: str, why_off: str | None = None) -> Case:
    attention = CONVENTIONS[convention].attention

    def flops(counts: Counts, length: int) -> float:
        return counts.of(model, length, attention).by_convention[convention]

    return Case(model, convention, group, says, flops, why_off)


_BRIDGE_SAYS = f"causal half, no routers, output head; {_BRIDGE}"
_BRIDGE_MODELS = {
    "LLAMA3_8B": "Llama 3 8B",
    "LLAMA3_70B": "Llama 3 70B",
    "LLAMA3.1_405B": "Llama 3 405B",
    "Qwen3_30B_a3B": "Qwen3 30B",
    "Qwen3_235B_a22B": "Qwen3 235B",
    "DeepSeekV3 (w/o MTP)": "DeepSeek V3",
    "Kimi_K2": "Kimi K2",
}
_NOT_BUILT = {
    "DeepSeekV4 Flash": "the sizes of the model were not found in a source",
    "Nemotron_3_Ultra": "the sizes of the model were not found in a source",
    "Nemotron_3_5_Lightning": "the sizes of the model were not found in a source",
}
# Releases of Megatron-Bridge whose container counts gated experts with another activation than SiLU as two products.
_TWO_PRODUCTS = ("25.11", "26.02", "26.02.01", "26.04", "26.04.01")


def _of_bridge(row: Row) -> Case | NotCompared:
    model = row.model.removesuffix(" (tokendrop)").removesuffix(" (dropless)").removesuffix(" (w/ MTP)")
    if model in _NOT_BUILT:
        return NotCompared(f"not built here: {_NOT_BUILT[model]}")
    if row.kind == "lora":
        why = "the formula for LoRA takes the squared lengths of the packed samples, which the table does not have"
        return NotCompared(f"{why}; {_BRIDGE}")
    if row.kind == "sft":
        says = f"{_BRIDGE_SAYS}; whether packed samples count as one sequence is not said for this release"
        return _plain(_BRIDGE_MODELS[model], "megatron", "inferred", says)
    if model == "DeepSeekV3":
        return _deepseek_with_prediction()
    if model == "GPT OSS 120B":
        return _gpt_oss_with_two_products() if row.release in _TWO_PRODUCTS else _gpt_oss()
    if model == "Nemotron_3_Nano":
        return _nemotron("Nemotron 3 Nano", 23, 0)
    if model == "Nemotron_3_Super":
        return _nemotron("Nemotron 3 Super", 40, 2)
    return _plain(_BRIDGE_MODELS[model], "megatron", "stated", _BRIDGE_SAYS)


def _deepseek_with_prediction() -> Case:
    """DeepSeek V3 with one further prediction: a layer, an output head and a projection of two widths to one."""
    model, width = "DeepSeek V3, 62 layers", 7168

    def flops(counts: Counts, length: int) -> float:
        count = counts.of(model, length, "causal")
        return count.by_convention["megatron"] + count.head + 6 * 2 * width * width

    says = f"{_BRIDGE_SAYS}; mtp_num_layers = 1: recipes/deepseek/deepseek_v3.py (05d003fb)"
    return Case("DeepSeek V3 with MTP", "megatron", "stated", says, flops)


def _gpt_oss() -> Case:
    return _plain("GPT-OSS 120B", "megatron", "stated", f"{_BRIDGE_SAYS}, pairs within the window of 128")


def _gpt_oss_with_two_products() -> Case:
    """Earlier versions: `3 / 2 if gated_linear_unit and activation_func == F.silu else 1`, and no window."""
    model = "GPT-OSS 120B, no windows"

    def flops(counts: Counts, length: int) -> float:
        count = counts.of(model, length, "causal")
        return count.by_convention["megatron"] - count.experts / 3

    says = (
        "causal half without windows, no routers, two products per expert; an earlier flop_utils.py says so, and which "
        "containers had it is not known"
    )
    return Case("GPT-OSS 120B", "megatron", "inferred", says, flops)


def _nemotron(model: str, layers_of_states: int, predictions: int) -> Case:
    width, heads = int(MODELS[model].settings["hidden_size"]), int(MODELS[model].settings["mamba_num_heads"])
    state, groups = 128, 8
    inner = 2 * width
    layer = 2 * width * (2 * inner + 2 * groups * state + heads) + 7 * inner * state + 2 * inner * width

    def flops(counts: Counts, length: int) -> float:
        count = counts.of(model, length, "causal")
        return count.by_convention["megatron"] - count.states + 3 * layers_of_states * layer + predictions * count.head

    says = f"{_BRIDGE_SAYS}; a state-space layer by `mamba_layer_flops`, whose inner width is twice the model's"
    return Case(model, "megatron", "own term", says, flops)


_AUTOMODEL_SAYS = f"causal half, no routers, output head; {_AUTOMODEL}"
_AUTOMODEL_MODELS = {
    "Llama3 8B": "Llama 3 8B",
    "Llama3 70B": "Llama 3 70B",
    "LLAMA3_70B": "Llama 3 70B",
    "Qwen3 MoE 30B": "Qwen3 30B",
    "Qwen3_30B_a3B": "Qwen3 30B",
    "Kimi K2": "Kimi K2",
    "DeepSeek V3 671B": "DeepSeek V3",
    "DeepSeekV3 (w/o MTP)": "DeepSeek V3",
    "Qwen2.5 7B": "Qwen2.5 7B",
    "Qwen2.5 32B": "Qwen2.5 32B",
}


def _of_automodel(row: Row) -> Case | NotCompared:
    if row.model == "Nemotron V3 Ultra 550B":
        return NotCompared("not built here: the sizes of the model were not found in a source")
    if row.model == "Nemotron V3 Super 120B":
        return NotCompared(
            "the formula for Nemotron-H that was read has no experts on a smaller width; another version made this row"
        )
    if row.model == "Nemotron V3 Nano 30B":
        return _nano_of_automodel()
    if row.model.startswith("GPT-OSS"):
        says = f"{_AUTOMODEL_SAYS}, windows; heads as wide as model / heads = 45, where the model has 64"
        return _plain(f"{row.model}, heads of 45", "megatron", "own term", says)
    model = _AUTOMODEL_MODELS[row.model]
    return _lora(model) if row.kind == "lora" else _plain(model, "megatron", "stated", _AUTOMODEL_SAYS)


def _nano_of_automodel() -> Case:
    model, layers, width, inner, state, groups, heads = "Nemotron 3 Nano, heads of 84", 23, 2688, 4096, 128, 8, 64
    layer = 6 * (width * (2 * inner + 2 * groups * state + heads) + inner * state + inner * width)

    def flops(counts: Counts, length: int) -> float:
        count = counts.of(model, length, "causal")
        return count.by_convention["megatron"] - count.states + layers * layer

    says = f"{_AUTOMODEL_SAYS}; `nemotronh_flops`: heads as wide as model / heads = 84, where the model has 128"
    return Case("Nemotron 3 Nano", "megatron", "own term", says, flops)


_RANK = 16


def _lora(model: str) -> Case:
    """The FLOPs of a full training times (2 + adapters / frozen) / 3, with adapters on all layers named `*_proj`."""
    sizes: dict[str, int] = MODELS[model].settings
    width, feed_forward = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    ends = 2 * (2 * width) + 2 * (width + keys) + 3 * (width + feed_forward)
    adapters = _RANK * ends * sizes["num_hidden_layers"]

    def flops(counts: Counts, length: int) -> float:
        count = counts.of(model, length, "causal")
        return count.by_convention["megatron"] * (2 + adapters / count.parameters) / 3

    says = (
        f"{_AUTOMODEL_SAYS}; x (2 + adapters / frozen) / 3, recipes/llm/benchmark.py (05de44f6); rank {_RANK} on *_proj"
    )
    return Case(model, "megatron", "own term", says, flops)


def _of_foundry(row: Row) -> Case | NotCompared:
    says = "6 FLOPs for every parameter, all pairs; scripts/train/benchmarking/README.md (c90b9b31)"
    return _plain(row.model, "llm-foundry", "stated", says)


def _of_torchtitan(row: Row) -> Case | NotCompared:
    says = "6 FLOPs for every parameter but the embeddings, all pairs; torchtitan/utils.py (0011fb90)"
    why = "the page has 33 % to 39 % for four rows; 33 % is that of 128 devices, and this row is another"
    return _plain("Llama 3 8B", "torchtitan", "stated", says, why)


def _of_maxtext(row: Row) -> Case | NotCompared:
    names = {"LLAMA3_8B": "Llama 3 8B", "LLAMA3_70B": "Llama 3 70B", "LLAMA3.1_405B": "Llama 3 405B"}
    model = names.get(row.model, row.model.replace("Llama 3.1", "Llama 3"))
    says = "causal half, routers; calculate_tflops_training_per_device; older rows of the page count all pairs"
    return _plain(
        model, "maxtext", "inferred", says, "unexplained, unless the row is an older one that counts all pairs"
    )
