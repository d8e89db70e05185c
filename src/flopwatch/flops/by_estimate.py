"""Estimates the FLOPs of a step from the shapes of the model's weights, without running the model.

Every weight matrix is multiplied with every token of its stream (text, image patches) once. This takes 2 FLOPs per
weight and token in the forward pass. In the backward pass, the gradient of the input and that of the weight take 2 more
each, if they are needed (Kaplan et al., arXiv 2001.08361, §2.1, assume both). Experts count by the share that is active
per token. Attention adds two products over the pairs of positions. State-space scans, relative positions and losses are
left out. docs/accuracy.md has the measured errors per architecture.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import named, real_lengths
from flopwatch.flops.tracing.passes import CountOptions
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.records.flops import AttentionConvention, FlopCount, PhaseFlops


@dataclass
class Stream:
    """The positions (tokens or image patches) that one part of a model processes.

    `positions` is the number of positions in the batch, `attended` the number in one sample. `size` is the spatial
    size of the next convolution's input. Each convolution with a stride reduces `size`.
    """

    batch_size: int
    positions: int
    attended: int
    size: list[int] = field(default_factory=list)
    _before: list[int] = field(default_factory=list)

    @property
    def attended_now(self) -> int:
        return prod(self.size) if self._before else self.attended

    def linear_positions(self, path: str) -> int:
        """Return how many positions of the batch a weight matrix is multiplied with, after pooling and strides."""
        if self.size and path.rpartition(".")[2] in _AFTER_POOLING:
            return self.batch_size
        return self.batch_size * prod(self.size) if self._before else self.positions

    def conv_positions(self, path: str, module: nn.Module) -> int:
        """Return at how many positions of one sample a convolution or pooling runs; set `size` for the next module."""
        dims = len(self.size)

        def sides(name: str) -> list[int]:
            value = getattr(module, name, 1)
            if isinstance(value, str):  # padding="same" or "valid"
                return [0] * dims
            return [value] * dims if isinstance(value, int) else list(value)

        kernel, stride, padding, dilation = map(sides, ("kernel_size", "stride", "padding", "dilation"))
        if not dims or len(kernel) != dims:
            return max(1, self.positions // max(1, self.batch_size))
        # A shortcut runs in parallel to the convolution that is listed before it, so both have the same input.
        is_shortcut = any(word in path for word in ("shortcut", "downsample.0", "residual"))
        entering = self._before if is_shortcut and self._before else self.size
        leaving = [
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(entering, kernel, stride, padding, dilation, strict=True)
        ]
        if not is_shortcut and all(side > 0 for side in leaving):
            self._before, self.size = self.size, leaving
        return max(1, prod(leaving))


# Names of layers that get one pooled vector per image.
_AFTER_POOLING = {"classifier", "fc", "head", "visual_projection"}


def read_streams(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Stream]:
    text = _text_stream(batch)
    image = _image_stream(model, batch, text)
    config = getattr(model, "config", None)
    # The vision tower merges neighbouring patches before they enter the language model.
    side = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    share = side**2 if isinstance(side, int) else 1
    merged = Stream(image.batch_size, image.positions // share, image.attended // share)
    streams = {"text": text, "image": image, "merged": merged}
    if getattr(config, "is_encoder_decoder", False):
        target = batch.get("decoder_input_ids", batch.get("labels"))
        streams["encoder"] = image if "input_features" in batch else text
        if isinstance(target, torch.Tensor):
            streams["decoder"] = Stream(target.shape[0], target.numel(), target.shape[1])
    return streams


def stream_of(path: str, streams: Mapping[str, Stream]) -> str:
    """Return which stream (such as `text` or `image`) a module processes, judged by the module's path."""
    path = path.lower()
    if "merger" in path or "projector" in path:
        return "merged"
    if any(word in path for word in ("vision", "visual", "image", "patch", "vit", "resnet", "convnext")):
        return "image"
    if "decoder" in streams:
        return "encoder" if "encoder" in path.split(".") else "decoder"
    return "text" if streams["text"].positions else "image"


def _text_stream(batch: Mapping[str, Any]) -> Stream:
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    if ids is None:
        others = [value for name, value in batch.items() if name != "labels" and isinstance(value, torch.Tensor)]
        ids = next((value for value in others if value.dim() == 2 and not value.is_floating_point()), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2:
        return Stream(0, 0, 0)
    lengths = real_lengths(batch) or [ids.shape[1]] * ids.shape[0]
    # Attention FLOPs grow with the square of the length, so the typical length is the root mean square.
    attended = round((sum(length**2 for length in lengths) / len(lengths)) ** 0.5)
    return Stream(ids.shape[0], sum(lengths), attended)


def _image_stream(model: nn.Module, batch: Mapping[str, Any], text: Stream) -> Stream:
    grid = batch.get("image_grid_thw")
    if isinstance(grid, torch.Tensor):
        patches = [prod(sides) for sides in grid.tolist()]
        return Stream(len(patches), sum(patches), round((sum(p**2 for p in patches) / len(patches)) ** 0.5))
    floats = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    pixels = batch.get("pixel_values", floats[0] if floats else None)
    if not isinstance(pixels, torch.Tensor) or pixels.dim() < 2:
        return Stream(text.batch_size or 1, 0, 0)
    if pixels.dim() < 4:
        return Stream(pixels.shape[0], prod(pixels.shape[:-1]), pixels.shape[-1], [pixels.shape[-1]])
    config = getattr(model, "config", None)
    side = getattr(getattr(config, "vision_config", config), "patch_size", None)
    size = list(pixels.shape[2:])
    patches_per_image = prod(extent // side for extent in size) if isinstance(side, int) else 1
    return Stream(pixels.shape[0], pixels.shape[0] * patches_per_image, patches_per_image, size)


# Names in transformers' configs for the number of active experts per token.
_ACTIVE_EXPERTS = (
    *("num_experts_per_tok", "top_k", "num_experts_per_token", "moe_topk", "moe_top_k", "num_selected_experts"),
)
# Names of projections in the attention modules of transformers and timm.
_QUERY = ("q_proj", "q_b_proj", "query", "q", "wq", "to_q", "query_proj", "q_lin")
_OUTPUT = ("o_proj", "out_proj", "o", "wo", "dense", "c_proj", "proj", "to_out", "out_lin")
_VALUE = ("value", "v_proj", "v")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLINGS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


@dataclass(frozen=True, slots=True)
class _Product:
    module: str
    multiply_adds: int
    trained: bool


def count_by_estimate(model: nn.Module, batch: Any, options: CountOptions) -> FlopCount:
    """Estimate the FLOPs of one step. Raises InputError for a model without a weight matrix."""
    model = unwrap(model)
    streams = read_streams(model, named(batch))
    products = list(_weight_products(model, streams))
    if not products:
        raise InputError(f"the FLOPs of {type(model).__name__} cannot be estimated, because it has no weight matrix")
    scores = _attention_products(model, streams, options.attention)
    by_module: dict[str, PhaseFlops] = {}
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    any_trained_before = any(own.requires_grad for module in embeddings for own in module.parameters(recurse=False))
    # A norm runs first in its layer, so all products of a layer with a trained norm need input gradients.
    trained_norms = {
        _layer(path)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name == "weight" and parameter.dim() == 1 and parameter.requires_grad
    }
    for product in _in_order(products, scores):
        any_trained_before = any_trained_before or _layer(product.module) in trained_norms
        backward = int(any_trained_before) * product.multiply_adds
        if product in scores:
            backward *= 2  # both factors are activations, and each needs a gradient
        elif product.trained:
            backward += product.multiply_adds
        # An input needs a gradient only if an earlier parameter is trained.
        any_trained_before = any_trained_before or product.trained
        flops = PhaseFlops(2 * product.multiply_adds, 2 * backward if options.training else 0)
        by_module[product.module] = by_module.get(product.module, PhaseFlops()) + flops
    checkpointed = options.training and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    total = sum(by_module.values(), PhaseFlops())
    recompute = total.forward if checkpointed else 0
    notes = ["the FLOPs are estimated from the shapes of the weights; docs/accuracy.md lists the errors of estimates"]
    if checkpointed:
        notes.append("the model uses gradient checkpointing, so the estimate includes one more forward pass")
    return FlopCount(
        model_flops=total.forward + total.backward,
        hardware_flops=total.forward + total.backward + recompute,
        forward_flops=total.forward,
        backward_flops=total.backward,
        recompute_flops=recompute,
        method="estimate",
        attention=options.attention,
        by_module=by_module,
        notes=tuple(notes),
    )


def _weight_products(model: nn.Module, streams: Mapping[str, Stream]) -> Iterator[_Product]:
    for path, module in model.named_modules():
        stream = streams[stream_of(path, streams)]
        if isinstance(module, _POOLINGS):
            stream.conv_positions(path, module)
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() < 2 or name.endswith("bias") or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if isinstance(module, _CONVOLUTIONS):
                positions = stream.batch_size * stream.conv_positions(path, module)
                yield _Product(path, positions * prod(weight.shape), weight.requires_grad)
                continue
            per_token: float = prod(weight.shape)
            if weight.dim() == 3:
                # If the first dimension is 1, this is a class token or a position table. Otherwise it stacks experts.
                per_token *= _active_share(model, weight.shape[0]) if weight.shape[0] > 1 else 0
            elif ".experts." in f".{path}." and path.rpartition("experts.")[2][:1].isdigit():
                siblings = model.get_submodule(path.rpartition("experts.")[0] + "experts").children()
                per_token *= _active_share(model, len(list(siblings)))
            if per_token:
                yield _Product(path, int(stream.linear_positions(path) * per_token), weight.requires_grad)


def _active_share(model: nn.Module, experts: int) -> float:
    config = getattr(model, "config", None)
    holders = config, getattr(config, "text_config", None)
    active = (getattr(holder, name, None) for holder in holders for name in _ACTIVE_EXPERTS)
    return next((min(1.0, each / experts) for each in active if isinstance(each, int)), 1.0)


def _attention_products(
    model: nn.Module, streams: Mapping[str, Stream], attention: AttentionConvention
) -> list[_Product]:
    """Return the products over pairs of positions (scores, and scores times values) of every attention module."""
    products = []
    of_causal_model = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    for path, module in model.named_modules():
        widths = _attention_widths(module)
        if widths:
            stream = streams[stream_of(path, streams)]
            queries = keys = stream.attended_now
            if "encoder" in streams and any(word in path.lower() for word in ("encdec", "cross", "encoder_attn")):
                keys = streams["encoder"].attended_now
            is_causal = "causal" in type(module).__name__.lower() or of_causal_model
            half = attention == "causal" and queries == keys and is_causal and not re.search("vision|visual", path)
            pairs = queries * (keys + 1) // 2 if half else queries * keys
            products.append(_Product(path, stream.batch_size * pairs * sum(widths), False))
    return products


def _attention_widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the summed width of all heads' queries, and that of their values; None if this is no attention layer."""
    if "attention" not in type(module).__name__.lower() and "attn" not in type(module).__name__.lower():
        return None
    children = {name.lower(): child for name, child in module.named_children()}

    def width(names: Sequence[str], side: int) -> int | None:
        return next((_features(children[name])[side] for name in names if name in children), None)

    outgoing, query, value = width(_OUTPUT, 0), width(_QUERY, 1), width(_VALUE, 1)
    fused = any("qkv" in name or name in ("query_key_value", "c_attn", "in_proj") for name in children)
    if query is None and not fused:
        return None
    wide = outgoing or (value if value and query and value >= query else query)
    return (query or wide or 0, wide or 0) if wide else None


def _features(module: nn.Module) -> tuple[int | None, int | None]:
    module = getattr(module, "base_layer", module)
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:  # GPT-2's Conv1D stores its weight transposed
        return weight.shape[0], weight.shape[1]
    return None, None


def _in_order(products: list[_Product], scores: list[_Product]) -> list[_Product]:
    """Insert each attention product after the projections that compute its factors."""
    ordered: list[_Product] = []
    waiting = list(scores)
    for product in products:
        while waiting and not product.module.startswith(waiting[0].module):
            if not any(earlier.module.startswith(waiting[0].module) for earlier in ordered):
                break
            ordered.append(waiting.pop(0))
        ordered.append(product)
    return ordered + waiting


def _layer(path: str) -> str:
    parts = path.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])
