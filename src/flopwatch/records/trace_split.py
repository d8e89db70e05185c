"""How the time of some traced steps was spent, as read from a profiler trace. Standard library only."""

from dataclasses import dataclass

from flopwatch.decode import Stored


@dataclass(frozen=True, slots=True)
class TraceSplit(Stored):
    """The time of one rank's traced steps by use. All uses except `hidden_communication_seconds` add up to `seconds`.

    On an accelerator the uses are those of the device: kernels, copies and the time in which it has no work. On a CPU
    they are ops of any thread of the process.

    Attributes:
        file: Name of the trace file.
        rank: The rank that was traced.
        device: `cpu`, or the kind of accelerator such as `cuda`.
        steps: Number of traced steps.
        seconds: Time of the traced steps, from the start of the first to the end of the last.
        matmul_seconds: Matrix products and convolutions.
        attention_seconds: Fused attention.
        other_kernel_seconds: All other computation of forward and backward pass: norms, activations, element-wise ops.
        optimizer_seconds: Work of the optimizer's step.
        exposed_communication_seconds: Communication while the device computes nothing.
        hidden_communication_seconds: Communication behind computation; it costs no time and is part of no sum.
        copy_seconds: Copies between host and device while the device computes nothing.
        idle_seconds: Time in which the device has no work: waiting for input, for the host, or for Python.
        written_unix_time: When the file was written; None if it does not matter, because the user has named the file.
    """

    file: str
    rank: int
    device: str
    steps: int
    seconds: float
    matmul_seconds: float = 0.0
    attention_seconds: float = 0.0
    other_kernel_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    hidden_communication_seconds: float = 0.0
    copy_seconds: float = 0.0
    idle_seconds: float = 0.0
    written_unix_time: float | None = None
