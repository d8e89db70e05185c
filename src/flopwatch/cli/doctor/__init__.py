"""`flopwatch doctor`: what is there, what is missing, and whether it works. This file declares its arguments."""

import warnings
from typing import Annotated

from flopwatch.cli import flag
from flopwatch.errors import InputError

GPU_FILE = "flopwatch-gpu.json"


def doctor(
    gpu: Annotated[
        bool, flag("Check an accelerator of this machine, and write what is found into a file to send.", "--gpu")
    ] = False,
    output: Annotated[str | None, flag(f"File that --gpu writes. Default: {GPU_FILE}.", metavar="PATH")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
) -> None:
    """Check that flopwatch works on this machine, and say what is missing; takes some seconds.

    Shows versions, devices with their peaks, extras with the command that installs what is missing, and problems. The
    status is 1 if something that is installed does not work. With --gpu, it checks an accelerator instead, which takes
    some minutes.
    """
    if output is not None and not gpu:
        raise InputError(f"--output {output!r} is the file of --gpu; add --gpu, or leave it out")
    # Torch warns of this when it is imported; flopwatch does without NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if gpu:
        from flopwatch.cli.doctor.gpu import show_gpu

        status = show_gpu(output or GPU_FILE, as_json=as_json)
    else:
        from flopwatch.cli.doctor.examine import show_machine

        status = show_machine(as_json=as_json)
    if status:
        raise SystemExit(status)
