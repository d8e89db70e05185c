"""The columns of the accuracy table: every tool, under which heading, and how its number was obtained."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    tool: str
    group: str
    title: str
    heading: str
    """The title in short lines, for the head of a narrow column."""
    how: str


_NO_BACKWARD = "It sees the forward pass only; a training step is taken as three times that"

COLUMNS = [
    Column(
        "flopwatch_trace",
        "flopwatch",
        "trace",
        "trace",
        '`count_flops(model, batch, method="trace")`: traced with fake tensors, so that no product is computed.',
    ),
    Column(
        "flopwatch_step",
        "flopwatch",
        "step",
        "step",
        '`count_flops(model, batch, method="step")`: one real step.',
    ),
    Column(
        "flopwatch_estimate",
        "flopwatch",
        "estimate",
        "estimate",
        '`count_flops(model, batch, method="estimate")`, from the shapes of the modules.',
    ),
    Column(
        "flop_counter_mode",
        "PyTorch",
        "FlopCounterMode",
        "FlopCounter\nMode",
        "`torch.utils.flop_counter.FlopCounterMode` as it comes, around forward and backward.",
    ),
    Column(
        "profiler",
        "PyTorch",
        "profiler with_flops",
        "profiler\nwith_flops",
        "`torch.profiler.profile(with_flops=True)` around forward and backward, the FLOPs of all events added.",
    ),
    Column(
        "hf_trainer",
        "rules of thumb",
        "HF Trainer",
        "HF\nTrainer",
        "`transformers.Trainer.floating_point_ops`, called itself: 6 x elements of the main input x parameters without "
        "embeddings. For pictures and sound those elements are pixels and samples.",
    ),
    Column(
        "six_n",
        "rules of thumb",
        "6 x N x tokens",
        "6 x N\nx tokens",
        "N = all parameters; tokens = `input_ids`, for ViT the patches, for Whisper the frames. It says nothing about "
        "models without tokens (n/a).",
    ),
    Column(
        "seven_and_a_half_n",
        "rules of thumb",
        "7.5 x N x tokens",
        "7.5 x N\nx tokens",
        "The rule of the documents flopwatch was built from: 2.5 x N x tokens forward, twice that backward.",
    ),
    Column(
        "fvcore",
        "from PyPI",
        "fvcore",
        "fvcore",
        f"`FlopCountAnalysis(...).total()`, which counts a multiply-add as one: x 2. {_NO_BACKWARD}.",
    ),
    Column(
        "calflops",
        "from PyPI",
        "calflops",
        "calflops",
        "`calculate_flops(..., include_backPropagation=True)`: forward x 3 by its own factor. It also counts "
        "element-wise work, which the truth leaves out.",
    ),
    Column(
        "ptflops",
        "from PyPI",
        "ptflops",
        "ptflops",
        "`get_model_complexity_info` with the `aten` backend its documentation advises for transformers; "
        f"multiply-adds: x 2. {_NO_BACKWARD}.",
    ),
    Column(
        "deepspeed",
        "from PyPI",
        "DeepSpeed",
        "Deep\nSpeed",
        f"`get_model_profile`, its FLOPs. {_NO_BACKWARD}, as its own report does. It also counts element-wise work, "
        "which the truth leaves out.",
    ),
    Column(
        "mfu_tracker",
        "from PyPI",
        "mfu-tracker",
        "mfu-\ntracker",
        "`profile_flops(model, kwargs=batch)`: torch's counter around the forward pass, x 3 by itself.",
    ),
]

RIVALS = [column.tool for column in COLUMNS if column.group == "from PyPI"]
