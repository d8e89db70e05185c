"""`flopwatch flops`: what a training step of a model costs, before anything is trained."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import nn

    from flopwatch.records.flops import FlopCount, Peak


def flops(
    model: Annotated[
        str, typer.Option(help="tiny, small, medium, 1b; a Hugging Face config.json; or module:function.")
    ],
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Positions of each sample.")] = 1024,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="With gradient checkpointing.")] = False,
    attention: Annotated[
        str, typer.Option(help="full counts every pair of positions, causal those not masked.")
    ] = "full",
    method: Annotated[str, typer.Option(help="auto, trace, step or estimate.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help='A product for the MFU of a step, such as "NVIDIA H100 80GB HBM3".')
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute type on that product. Default: bf16.")] = None,
    step_time: Annotated[float | None, typer.Option(help="Seconds of such a step, for its MFU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """The FLOPs of one training step: forward, backward, recomputation, by module."""
    from flopwatch.flops.count import count_flops
    from flopwatch.models.load import dummy_batch

    peak = _peak(device, dtype, step_time)
    _quiet_transformers()
    built = _built(model, checkpoint=checkpoint, with_weights=method == "step")
    count = count_flops(built, dummy_batch(built, batch_size, seq_len), method=method, attention=attention)  # type: ignore[arg-type]
    facts = _facts(model, built, count, batch_size, seq_len)
    if peak is not None and step_time is not None:
        facts["step"] = _step(count, peak, step_time)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2))
    else:
        from flopwatch.cli.flops_table import print_flops

        print_flops(facts, count, peak)


def _quiet_transformers() -> None:
    """Its advice on training options is for people who train; it reads this when it is first imported."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _built(model: str, *, checkpoint: bool, with_weights: bool) -> "nn.Module":
    from flopwatch.errors import InputError
    from flopwatch.models.load import load_model

    built = load_model(model, device="cpu" if with_weights else "meta")
    if checkpoint:
        enable = getattr(built, "gradient_checkpointing_enable", None)
        if enable is None:
            raise InputError(f"{type(built).__name__} has no gradient_checkpointing_enable; leave out --checkpoint")
        enable()
    return built


def _peak(device: str | None, dtype: str | None, step_time: float | None) -> "Peak | None":
    from flopwatch.errors import InputError
    from flopwatch.hardware import explain_unknown, peak_flops

    if (device is None) != (step_time is None):
        raise InputError("the MFU of a step needs both --device and --step-time")
    if device is None:
        return None
    peak = peak_flops(dtype=dtype, name=device)
    if peak is None:
        raise InputError(explain_unknown(dtype=dtype, name=device))
    return peak


def _facts(spec: str, model: "nn.Module", count: "FlopCount", batch_size: int, seq_len: int) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "model": spec,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "flops": count.to_json(),
    }


def _step(count: "FlopCount", peak: "Peak", seconds: float) -> dict[str, Any]:
    from flopwatch.compat import calculate_mfu

    return {
        "seconds": seconds,
        "mfu": calculate_mfu(count.model_flops, seconds, peak.flops_per_s),
        "hfu": calculate_mfu(count.hardware_flops, seconds, peak.flops_per_s),
        "peak": peak.to_json(),
    }
