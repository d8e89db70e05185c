"""Which parallel layouts of the tests this torch can train on the CPU, and which of them can be exact."""

import pytest
import torch

from flopwatch.flops.tracing import live

_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
COMPILED_ALONE = "where a process compiles, only compiled code is counted (a lower bound)"
_FULLY_SHARDED = ("fsdp2", "hsdp", "tp_fsdp2", "fsdp2_compiled")


def why_not(layout):
    """Why torch cannot train in this layout here, seen without flopwatch, or flopwatch count it; None if they can."""
    if layout in _FULLY_SHARDED and not hasattr(torch.cpu.Stream, "record_event"):
        return "FSDP2 on a CPU (torch's own fault: its streams have no `record_event` there)"
    if layout.startswith("pp") and _RELEASE == (2, 9):
        return "pipeline stages over gloo (torch's own fault: it aborts with `gloo::EnforceNotMet`)"
    if layout in ("pp_1f1b", "pp_interleaved") and _RELEASE == (2, 6):
        return "1F1B pipelines over gloo (torch's own fault: they hang)"
    if layout.endswith("compiled") and not live._compiles_beside:
        return COMPILED_ALONE
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
