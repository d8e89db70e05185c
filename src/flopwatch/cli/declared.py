"""`flopwatch flops` and `report`: their arguments. The work is elsewhere: it loads torch or rich."""

from typing import Annotated

from flopwatch.cli import argument, flag
from flopwatch.cli.run_logs import PEAK_TFLOPS
from flopwatch.records.settings import SETTINGS


def flops(
    model: Annotated[str, flag(SETTINGS["model"].text)],
    batch_size: Annotated[int, flag("Samples per step.")] = 1,
    seq_len: Annotated[int, flag("Sequence length: tokens of each sample.")] = 1024,
    checkpoint: Annotated[bool, flag("Use gradient checkpointing.", "--checkpoint")] = False,
    attention: Annotated[str, flag("full counts all token pairs in attention, causal only unmasked ones.")] = "full",
    method: Annotated[str, flag("How to count FLOPs: auto, trace, step or estimate.")] = "auto",
    convention: Annotated[
        str | None,
        flag("Also show FLOPs as publishers count them: megatron, maxtext, torchtitan, palm or llm-foundry."),
    ] = None,
    device: Annotated[str | None, flag('Device for the MFU, such as "NVIDIA H100 80GB HBM3"; see --step-time.')] = None,
    dtype: Annotated[str | None, flag("Compute type for the peak of --device. Default: bf16.")] = None,
    step_time: Annotated[float | None, flag("Seconds per step, to print MFU and HFU; needs --device.")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of tables.", "--json")] = False,
) -> None:
    """Count the FLOPs of one training step, by module: forward, backward and recomputation."""
    given = locals()
    from flopwatch.cli.flops_tables import count_and_print

    count_and_print(**given)


def report(
    directory: Annotated[str | None, argument("The folder of a sweep, of a run or of runs.", "[DIR]")] = None,
    logs_dir: Annotated[str | None, flag("The folder DIR/logs of a sweep; may be given instead of DIR.")] = None,
    html: Annotated[str | None, flag("Write one self-contained HTML page; - is stdout.", metavar="PATH")] = None,
    md: Annotated[str | None, flag("Write Markdown; - is stdout.", metavar="PATH")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    output: Annotated[str | None, flag("Write the JSON to a file.", metavar="PATH")] = None,
    csv: Annotated[
        str | None,
        flag("Write one row per trial, or per logging window of a run, as CSV; - is stdout.", metavar="PATH"),
    ] = None,
    metric: Annotated[str | None, flag("Tables to print, such as memory,time,tokens,samples,mfu,hfu.")] = None,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Print the report of a sweep or of a run, or write it as a page.

    Of a sweep: the best configuration, memory, time and MFU of each trainer, and failures. Of a run: MFU, where the
    rest of the peak and the wall time went, and how the numbers were found.
    """
    given = locals()
    from flopwatch.cli.report_forms import put_out_report

    put_out_report(**given)
