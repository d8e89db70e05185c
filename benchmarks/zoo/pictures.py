"""Specimens of torchvision and timm: one small model per family, at the smallest image it takes."""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from zoo.specimen import Shape, Specimen
from zoo.truth import SEED, call, step_loss

_SIZES = (64, 96, 128, 160, 224, 256)

TORCHVISION: dict[str, dict[str, Any]] = {
    "alexnet": {}, "vgg11": {}, "resnet18": {}, "resnet50": {}, "resnext50_32x4d": {},
    "densenet121": {}, "inception_v3": {}, "googlenet": {}, "mobilenet_v2": {},
    "mobilenet_v3_small": {}, "mobilenet_v3_large": {}, "shufflenet_v2_x0_5": {}, "squeezenet1_0": {},
    "squeezenet1_1": {}, "mnasnet0_5": {}, "efficientnet_b0": {}, "efficientnet_v2_s": {}, "regnet_x_400mf": {},
    "regnet_y_400mf": {}, "convnext_tiny": {}, "vit_b_16": {"image_size": 64}, "vit_b_32": {"image_size": 64},
    "swin_t": {}, "swin_v2_t": {}, "maxvit_t": {"input_size": (224, 224)}, "fcn_resnet50": {},
    "deeplabv3_mobilenet_v3_large": {}, "lraspp_mobilenet_v3_large": {}, "r3d_18": {},
    "mc3_18": {}, "r2plus1d_18": {}, "swin3d_t": {},
    "raft_small": {},
}  # fmt: skip
"""Names and the arguments that make them smaller. Detectors are left out: they need torchvision's compiled ops."""

_VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "swin3d_t")
_SMALL_FIRST = (
    "femto", "atto", "pico", "nano", "xxs", "xxtiny", "xtiny", "_xs", "_t0", "tiny", "mini", "_s12", "_s0",
    "_b0", "_m0", "002", "_050", "_18", "18", "_s", "small", "10", "26", "50", "_b", "base",
)  # fmt: skip


def torchvision_names() -> list[str]:
    return list(TORCHVISION)


def torchvision_specimen(name: str) -> Specimen:
    def build(_: bool) -> nn.Module:
        models = import_module("torchvision.models")
        torch.manual_seed(SEED)
        made: nn.Module = models.get_model(name, weights=None, **_without_pretrained_backbone(name))
        return made.train()

    return _specimen(build, 4 if name in _VIDEO else 0, pair=name.startswith("raft"))


def _without_pretrained_backbone(name: str) -> dict[str, Any]:
    dense = ("fcn", "deeplab", "lraspp")
    return {**TORCHVISION[name], **({"weights_backbone": None} if name.startswith(dense) else {})}


def timm_names() -> list[str]:
    """The likely smallest model of each of timm's modules."""
    timm = import_module("timm")
    chosen: list[str] = []
    for module in timm.list_modules():
        models = timm.list_models(module=module)
        if models:
            chosen.append(min(models, key=_rank))
    return sorted(dict.fromkeys(chosen))


def _rank(name: str) -> tuple[int, int, str]:
    found = next((place for place, part in enumerate(_SMALL_FIRST) if part in name), len(_SMALL_FIRST))
    return found, len(name), name


def timm_specimen(name: str) -> Specimen:
    def build(eager: bool, size: int | None = None) -> nn.Module:
        timm = import_module("timm")
        timm.layers.set_fused_attn(not eager)
        torch.manual_seed(SEED)
        sized = {} if size is None else {"img_size": size}
        made: nn.Module = timm.create_model(name, pretrained=False, num_classes=8, **sized)
        return made.train()

    try:
        return _specimen(partial(build, size=64), 0, sizes=(64,))
    except Exception:  # most convolutional models take any image and no such argument
        return _specimen(build, 0)


def _images(size: int, frames: int, pair: bool, shape: Shape) -> Any:
    generator = torch.Generator().manual_seed(SEED)
    dimensions = (shape.batch_size, 3, frames, size, size) if frames else (shape.batch_size, 3, size, size)
    made = torch.randn(*dimensions, generator=generator)
    return (made, made.flip(-1)) if pair else made


def _specimen(build: Any, frames: int, *, sizes: tuple[int, ...] = _SIZES, pair: bool = False) -> Specimen:
    """The first size with which a real step runs."""
    model = build(True)
    first_error: Exception | None = None
    for size in sizes:
        batch = partial(_images, size, frames, pair)
        try:
            step_loss(call(model, batch(Shape(2)))).backward()
            return Specimen("video" if frames else "vision", build, batch, Shape(2))
        except Exception as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error
