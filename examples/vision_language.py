"""A vision-language model: each image costs what its own size needs, which `image_grid_thw` in the batch tells.

python examples/vision_language.py
"""

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import flopwatch

IMAGE, IMAGE_START, IMAGE_END, TEXT_LENGTH = 500, 501, 502, 32


def batch_with_image(height: int, width: int) -> dict[str, torch.Tensor]:
    """A text with one image of height x width patches; four patches become one token of the text."""
    image = [IMAGE_START, *[IMAGE] * (height * width // 4), IMAGE_END]
    ids = torch.cat([torch.tensor(image), torch.randint(0, 500, (TEXT_LENGTH,))])[None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids >= IMAGE, -100),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(height * width, 3 * 2 * 8 * 8),  # 2 frames of 8 x 8 pixels with 3 colours
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


torch.manual_seed(0)
config = Qwen2VLConfig(
    text_config={
        "vocab_size": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    },
    vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 8},
    image_token_id=IMAGE,
    vision_start_token_id=IMAGE_START,
    vision_end_token_id=IMAGE_END,
)
model = Qwen2VLForConditionalGeneration(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
grids = [(4, 4), (8, 8), (16, 8), (16, 16)]

with flopwatch.TrainingMonitor("runs/vision_language", model=model) as monitor:
    for height, width in 3 * grids:
        batch = batch_with_image(height, width)
        with monitor.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)

row = flopwatch.runs.read_log(monitor.log_path).rows[0]  # one row for all steps, with a column for each quantity
flops, tokens = row.steps["model_flops"], row.steps["tokens"]
for index, (height, width) in enumerate(grids):
    print(f"{height} x {width} patches: {tokens[index]} tokens and {flops[index]:,} FLOPs.")
growth = flops[3] / tokens[3] / (flops[0] / tokens[0])
print(f"The FLOPs are exact: {row.exact}. A token of the largest image costs {growth:.2f} times one of the smallest.")
