"""Specimens of diffusers: denoisers and autoencoders with configurations made small by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from zoo.specimen import Shape, Specimen
from zoo.truth import SEED, call, step_loss

_Batch = dict[str, Any]


@dataclass(frozen=True)
class Denoiser:
    """A class, its arguments, and the shapes of one sample's inputs; an empty shape is one step of the noise."""

    config: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]
    more: Callable[[int], _Batch] = lambda size: {}
    """Inputs that are not noise."""


_BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
_CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 8,
    **_BLOCKS,
}  # fmt: skip
_UP = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
_IMAGE, _TIME, _TEXT = (4, 16, 16), (), (7, 32)
_CODER = {
    "block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "norm_num_groups": 8,
}  # fmt: skip
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def _classes(size: int) -> _Batch:
    return {"class_labels": torch.zeros(size, dtype=torch.long)}


def _flux_ids(_: int) -> _Batch:
    return {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}


def _resolution(size: int) -> _Batch:
    return {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def _frames(size: int) -> _Batch:
    return {"num_frames": 2}


def _added_time(size: int) -> _Batch:
    return {"added_time_ids": torch.zeros(size, 3)}


def _text_mask(size: int) -> _Batch:
    return {"encoder_attention_mask": torch.ones(size, 7)}


def _qwen_shapes(size: int) -> _Batch:
    return {"encoder_hidden_states_mask": torch.ones(size, 7).long(), "img_shapes": [[(1, 4, 4)]] * size}


ARCHITECTURES: dict[str, Denoiser] = {
    "UNet2DModel": Denoiser(
        {"in_channels": 4, "out_channels": 4, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8, **_BLOCKS},
        {"sample": _IMAGE, "timestep": _TIME}),
    "UNet2DConditionModel": Denoiser(
        {"sample_size": 16, **_CROSS, **_UP}, {"sample": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT}),
    "ControlNetModel": Denoiser(
        {**_CROSS, "conditioning_embedding_out_channels": (8, 16)},
        {"sample": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT, "controlnet_cond": (3, 32, 32)}),
    "UNet1DModel": Denoiser(
        {"block_out_channels": (16, 32, 32), "sample_size": 64, "in_channels": 2, "out_channels": 2,
         "extra_in_channels": 32},
        {"sample": (2, 64), "timestep": _TIME}),
    "UNet3DConditionModel": Denoiser(
        {"sample_size": 16, "cross_attention_dim": 32, "attention_head_dim": 8, **_BLOCKS,
         "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        {"sample": (4, 2, 16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT}),
    "UNetSpatioTemporalConditionModel": Denoiser(
        {"sample_size": 16, "block_out_channels": (32, 64), "cross_attention_dim": 32, "num_attention_heads": 2,
         "layers_per_block": 1, "projection_class_embeddings_input_dim": 96, "addition_time_embed_dim": 32,
         "in_channels": 4, "num_frames": 2,
         "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")},
        {"sample": (2, 4, 16, 16), "timestep": _TIME, "encoder_hidden_states": (1, 32)}, _added_time),
    "AutoencoderKL": Denoiser(_CODER, {"sample": (3, 32, 32)}),
    "AsymmetricAutoencoderKL": Denoiser(
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
         "down_block_out_channels": (16, 32), "up_block_out_channels": (16, 32), "norm_num_groups": 8},
        {"sample": (3, 32, 32)}),
    "AutoencoderTiny": Denoiser(
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16), "num_encoder_blocks": (1, 1),
         "num_decoder_blocks": (1, 1)}, {"sample": (3, 32, 32)}),
    "VQModel": Denoiser({**_CODER, "num_vq_embeddings": 16}, {"sample": (3, 32, 32)}),
    "AutoencoderOobleck": Denoiser(
        {"encoder_hidden_size": 16, "downsampling_ratios": [2, 4], "decoder_channels": 8, "decoder_input_channels": 8,
         "audio_channels": 2, "channel_multiples": [1, 2]}, {"sample": (2, 64)}),
    "AutoencoderKLTemporalDecoder": Denoiser(
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 32)},
        {"sample": (3, 32, 32)}, _frames),
    "DiTTransformer2DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "sample_size": 16, "norm_num_groups": 4, "num_embeds_ada_norm": 10},
        {"hidden_states": _IMAGE, "timestep": _TIME}, _classes),
    "PixArtTransformer2DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "sample_size": 16, "cross_attention_dim": 32, "caption_channels": 32,
         "use_additional_conditions": False},
        {"hidden_states": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT}, _resolution),
    "Transformer2DModel": Denoiser(
        {**_HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        {"hidden_states": (32, 8, 8), "encoder_hidden_states": _TEXT}),
    "SD3Transformer2DModel": Denoiser(
        {**_HEADS, "sample_size": 16, "in_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
         "pooled_projection_dim": 32, "out_channels": 4},
        {"hidden_states": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT, "pooled_projections": (32,)}),
    "FluxTransformer2DModel": Denoiser(
        {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        {"hidden_states": (16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT, "pooled_projections": (32,)},
        _flux_ids),
    "AuraFlowTransformer2DModel": Denoiser(
        {"sample_size": 16, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 256},
        {"hidden_states": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT}),
    "SanaTransformer2DModel": Denoiser(
        {"in_channels": 4, "out_channels": 4, "sample_size": 16, "num_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
         "cross_attention_dim": 32, "caption_channels": 32},
        {"hidden_states": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT}),
    "CogVideoXTransformer3DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "sample_width": 16,
         "sample_height": 16, "sample_frames": 5, "max_text_seq_length": 7},
        {"hidden_states": (2, 4, 16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT}),
    "WanTransformer3DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64},
        {"hidden_states": (4, 2, 16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT}),
    "MochiTransformer3DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "pooled_projection_dim": 16, "text_embed_dim": 32, "time_embed_dim": 16},
        {"hidden_states": (4, 2, 16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT},
        lambda size: {"encoder_attention_mask": torch.ones(size, 7)}),
    "LTXVideoTransformer3DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 32},
        {"hidden_states": (32, 4), "timestep": _TIME, "encoder_hidden_states": _TEXT},
        lambda size: {"encoder_attention_mask": torch.ones(size, 7), "num_frames": 2, "height": 4, "width": 4}),
    "LatteTransformer3DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 2, "caption_channels": 32,
         "cross_attention_dim": 32, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 10,
         "norm_elementwise_affine": False, "video_length": 2},
        {"hidden_states": (4, 2, 8, 8), "timestep": _TIME, "encoder_hidden_states": _TEXT}),
    "CogView3PlusTransformer2DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 4,
         "pos_embed_max_size": 8, "sample_size": 8},
        {"hidden_states": (4, 8, 8), "timestep": _TIME, "encoder_hidden_states": _TEXT, "original_size": (2,),
         "target_size": (2,), "crop_coords": (2,)}),
    "CogView4Transformer2DModel": Denoiser(
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 4,
         "sample_size": 8},
        {"hidden_states": (4, 8, 8), "timestep": _TIME, "encoder_hidden_states": _TEXT, "original_size": (2,),
         "target_size": (2,), "crop_coords": (2,)}),
    "StableAudioDiTModel": Denoiser(
        {**_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_key_value_attention_heads": 1,
         "cross_attention_dim": 32, "cross_attention_input_dim": 32, "time_proj_dim": 8, "global_states_input_dim": 8},
        {"hidden_states": (4, 8), "timestep": _TIME, "encoder_hidden_states": _TEXT, "global_hidden_states": (1, 8)}),
    "AutoencoderDC": Denoiser(
        {"latent_channels": 4, "attention_head_dim": 2, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
         "decoder_block_out_channels": (8, 8), "encoder_qkv_multiscales": ((), (5,)),
         "decoder_qkv_multiscales": ((), (5,)), "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
         "downsample_block_type": "conv", "upsample_block_type": "interpolate"}, {"sample": (3, 32, 32)}),
    "HunyuanVideoTransformer3DModel": Denoiser(
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "text_embed_dim": 32,
         "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 8), "guidance_embeds": False},
        {"hidden_states": (4, 2, 8, 8), "timestep": _TIME, "encoder_hidden_states": _TEXT, "pooled_projections": (8,)},
        _text_mask),
    "ChromaTransformer2DModel": Denoiser(
        {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8,
         "approximator_hidden_dim": 16, "approximator_layers": 1},
        {"hidden_states": (16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT}, _flux_ids),
    "QwenImageTransformer2DModel": Denoiser(
        {**_HEADS, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT}, _qwen_shapes),
    "PriorTransformer": Denoiser(
        {**_HEADS, "embedding_dim": 32, "num_embeddings": 7, "additional_embeddings": 4},
        {"hidden_states": (32,), "timestep": _TIME, "proj_embedding": (32,), "encoder_hidden_states": _TEXT}),
    "StableCascadeUNet": Denoiser(
        {"in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "timestep_ratio_embedding_dim": 8,
         "patch_size": 1, "conditioning_dim": 16, "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1),
         "up_num_layers_per_block": (1, 1), "down_blocks_repeat_mappers": (1, 1), "up_blocks_repeat_mappers": (1, 1),
         "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
         "clip_text_in_channels": 16, "clip_text_pooled_in_channels": 16, "clip_image_in_channels": 16, "clip_seq": 2,
         "switch_level": (False,), "kernel_size": 3, "dropout": (0.0, 0.0), "self_attn": True,
         "timestep_conditioning_type": ("sca",)},
        {"sample": (4, 8, 8), "clip_text_pooled": (1, 16)}, lambda size: {"timestep_ratio": torch.full((size,), 0.5)}),
}  # fmt: skip


def specimen(name: str) -> Specimen:
    """Builds it and runs one real step."""
    build = partial(_build, name)
    batch = partial(_batch, ARCHITECTURES[name])
    step_loss(call(build(True), batch(Shape(2)))).backward()
    return Specimen("diffusion", build, batch, Shape(2))


def _build(name: str, _: bool) -> nn.Module:
    diffusers = import_module("diffusers")
    torch.manual_seed(SEED)
    made: nn.Module = getattr(diffusers, name)(**ARCHITECTURES[name].config)
    return made.train()


def _batch(denoiser: Denoiser, shape: Shape) -> _Batch:
    generator = torch.Generator().manual_seed(SEED)
    batch: _Batch = {}
    for name, dimensions in denoiser.inputs.items():
        noise = torch.randn(shape.batch_size, *dimensions, generator=generator)
        batch[name] = noise if dimensions else torch.full((shape.batch_size,), 3)
    return {**batch, **denoiser.more(shape.batch_size)}
