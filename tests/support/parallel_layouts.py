"""Which parallel layouts of the tests this torch can train on the CPU at all, flopwatch or not."""

import pytest
import torch

_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
_FULLY_SHARDED = ("fsdp2", "hsdp", "tp_dp", "tp_fsdp2", "fsdp2_compiled")


def why_not(layout):
    """Why torch cannot train in this layout here, seen without flopwatch; None if it can."""
    if layout in _FULLY_SHARDED and not hasattr(torch.cpu.Stream, "record_event"):
        return f"FSDP2 of torch {torch.__version__} does not run on the CPU: its streams have no record_event"
    if layout.startswith("pp") and _RELEASE < (2, 10):
        return f"pipelines of torch {torch.__version__} do not run on gloo: gloo::EnforceNotMet, or no scale_grads"
    return None


def trainable(layouts):
    return tuple(layout for layout in layouts if why_not(layout) is None)


def cases(layouts, *before):
    """The layouts as parameters of a test, after `before`; what torch cannot train is skipped with the reason."""
    return [
        pytest.param(*before, layout, marks=pytest.mark.skipif(bool(reason), reason=reason or ""))
        for layout in layouts
        for reason in [why_not(layout)]
    ]
