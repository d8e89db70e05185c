"""The rows of the cost tables: every tool, its title, and how it was run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    name: str
    title: str
    how: str


MONITORS = [
    Tool(
        "flopwatch",
        "flopwatch",
        '`TrainingMonitor(mode="smart", sinks=["tensorboard", "wandb"])`, W&B offline, and its own JSON Lines log; '
        "`log_step` with loss, gradient norm, learning rate and `attention_mask` on every step, a row every 50.",
    ),
    Tool(
        "lightning",
        "Lightning ThroughputMonitor",
        "Fabric's `ThroughputMonitor`, as its documentation has it for a plain loop: `measure_flops` once on the meta "
        "device, `update` on every step, `compute_and_log` to TensorBoard every 50. The Trainer's callback of the same "
        "name calls `torch.cuda.synchronize()` on every batch; there is no GPU here, so this costs nothing here.",
    ),
    Tool(
        "composer",
        "Composer SpeedMonitor",
        "Its callback with a real Composer `State` and `Logger` (TensorBoard), `batch_end` on every step, which is "
        "when its Trainer calls it; the training itself is not Composer's. It sums over the ranks on every batch; here "
        "there is one. It declares torch < 2.7.1 and was installed without that check, with a stand-in for "
        "torchvision, whose wheel needs CUDA.",
    ),
    Tool(
        "traceml",
        "TraceML",
        '`traceml serve` in a process of its own, `traceml.init(mode="auto")`, `with trace_step(model):` around every '
        "step. The functions of torch that it replaces are put back for the others' blocks; its sampling thread cannot "
        "be stopped, so what it costs (a sample every 2 s) is in the bare blocks too. It measures times, no FLOPs.",
    ),
    Tool(
        "mfu_tracker",
        "mfu-tracker",
        "`profile_flops` once, `with track(...)` around every step.",
    ),
    Tool(
        "documents",
        "documents' method, every 10",
        "The method of the documents flopwatch was built from, as they state it: torch's profiler with `with_flops` "
        "around a forward pass of a dummy batch, every 10 steps (what they advise for debugging). Their "
        "`activities=[CUDA]` is refused here: the CPU's are recorded.",
    ),
    Tool(
        "deepspeed",
        "DeepSpeed FlopsProfiler, every 10",
        "`start_profile`, forward, `stop_profile`, `get_total_flops`, `end_profile` every 10 steps, nothing printed.",
    ),
]

WAYS = [
    Tool("estimate", "flopwatch estimate", '`mode="estimate"`: never counts.'),
    Tool("smart", "flopwatch smart", '`mode="smart"`, `recalibration_frequency` = the frequency: checks its FLOP law.'),
    Tool(
        "profiler", "flopwatch profiler", '`mode="profiler"`, `flops_profile_freq` = the frequency: counts each time.'
    ),
    Tool("documents", "documents' method", "As above."),
    Tool("deepspeed", "DeepSpeed FlopsProfiler", "As above."),
]
