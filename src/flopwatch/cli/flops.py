"""`flopwatch flops`: counts the FLOPs of a training step."""

from typing import Annotated

from flopwatch.cli import flag
from flopwatch.records.settings import SETTINGS


def flops(
    model: Annotated[str, flag(SETTINGS["model"].flag)],
    batch_size: Annotated[int, flag("Samples per step.")] = 1,
    seq_len: Annotated[int, flag("Sequence length: tokens of each sample.")] = 1024,
    checkpoint: Annotated[bool, flag("Use gradient checkpointing.", "--checkpoint")] = False,
    attention: Annotated[str, flag("full counts all token pairs in attention, causal only unmasked ones.")] = "full",
    method: Annotated[str, flag("How to count FLOPs: auto, trace, step or estimate.")] = "auto",
    device: Annotated[str | None, flag('Device for the MFU, such as "NVIDIA H100 80GB HBM3"; see --step-time.')] = None,
    dtype: Annotated[str | None, flag("Compute type for the peak of --device. Default: bf16.")] = None,
    step_time: Annotated[float | None, flag("Seconds per step, to print MFU and HFU; needs --device.")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of tables.", "--json")] = False,
) -> None:
    """Count the FLOPs of one training step, by module: forward, backward and recomputation."""
    given = locals()
    from flopwatch.cli.flops_tables import count_and_print

    count_and_print(**given)
