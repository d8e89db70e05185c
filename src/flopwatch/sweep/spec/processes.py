"""How many processes a trial has, where, and how they share the training. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from flopwatch.errors import InputError
from flopwatch.records.trainer_names import PRIVATE
from flopwatch.records.trial import TrialSpec

LAYOUTS = ("ddp", "fsdp")


@dataclass(frozen=True, slots=True)
class ProcessPoint:
    """One point of the axes `nodes`, `processes` and `layout`."""

    nodes: int = 1
    processes: int = 1
    layout: str | None = None


def world_size(spec: TrialSpec) -> int:
    """Processes of the whole trial.

    >>> world_size(TrialSpec("standard", "tiny", 16, 8, nodes=2, processes=8))
    16
    """
    return spec.world_size


def process_points(
    nodes: Sequence[int], processes: Sequence[int], layouts: Sequence[str], gpus_per_node: int | None
) -> list[ProcessPoint]:
    """Every combination; a single process has no layout.

    >>> process_points([1], [1, 2], ["ddp", "fsdp"], None)[:2]
    [ProcessPoint(nodes=1, processes=1, layout=None), ProcessPoint(nodes=1, processes=2, layout='ddp')]
    """
    per_node = processes or [gpus_per_node or 1]
    points = itertools.product(nodes, per_node, layouts or ["ddp"])
    return list(dict.fromkeys(ProcessPoint(n, p, layout if n * p > 1 else None) for n, p, layout in points))


def needs_one_process(spec: TrialSpec) -> str | None:
    """Why a trainer cannot run in the processes asked for; None when it can."""
    if world_size(spec) == 1 or spec.trainer not in PRIVATE:
        return None
    return (
        f"the trainer {spec.trainer} runs in one process, and {world_size(spec)} are asked for; "
        "leave nodes and processes out for it"
    )


def check_processes(spec: TrialSpec) -> None:
    """
    Raises:
        InputError: Its processes cannot share this batch, or a command is to run on several nodes.
    """
    ranks = world_size(spec)
    if spec.layout is not None and spec.layout not in LAYOUTS:
        raise InputError(f"layout is {' or '.join(LAYOUTS)}, got {spec.layout!r}")
    if spec.trainer == "command":
        if spec.nodes > 1:
            raise InputError(f"a command runs on one node, and {spec.nodes} are asked for; leave `nodes` out")
        return
    if spec.batch_size % ranks:
        raise InputError(
            f"a batch of {spec.batch_size} samples cannot be shared by {ranks} processes ({spec.nodes} x "
            f"{spec.processes}): batch_size is that of the whole trial; take multiples of {ranks}, or leave it out "
            f"with exclude: batch_size={spec.batch_size} nodes={spec.nodes} processes={spec.processes}"
        )
