"""What the monitor costs a compiled training: compile time, peak memory, graphs, weights, and each call of its code.

    python benchmarks/compiled/harm.py [--rounds 7] [--backend aot_eager]

Runs the same training in new processes, in turns without and with a monitor, and prints the ratios with their spread.
A second process of a pair finds the compiler's caches as the first has left them.
"""

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 40
CALLS, REPEATS = 1000, 200


def train(backend: str, folder: str | None) -> dict[str, Any]:
    """One training: seconds of the compiler, processor time of the first steps, and what is left of it."""
    import torch

    import flopwatch
    from testbeds.compiled.trainings import TRAININGS, Compiler, batch_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    running = TRAININGS["whole"](Compiler(backend))
    monitor = None
    if folder is not None:
        monitor = flopwatch.TrainingMonitor(folder, model=running.model, log_every=10, peak_flops_per_s=1e12, sinks=[])
    began = time.process_time()
    for step in range(STEPS):
        ids = batch_of(step, lengths=(16, 24))
        if monitor is None:
            running.step(ids)
        else:
            with monitor.step({"ids": ids}):
                running.step(ids)
        if step == 3:
            first_steps = time.process_time() - began
    if monitor is not None:
        monitor.close()
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in running.parameters)).hexdigest()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = exact_rows(folder) if folder is not None else None
    compiler = sum(torch._dynamo.utils.compilation_time_metrics["_compile.compile_inner"])
    times = {"compiler": compiler, "first_steps": first_steps}
    return {**times, "peak": peak_kib, "graphs": graphs, "weights": weights, "exact": rows}


def exact_rows(folder: str) -> list[bool]:
    records = map(json.loads, (Path(folder) / "training_log.jsonl").read_text().splitlines())
    return [record["exact"] for record in records if record["type"] == "row"]


def seconds_per_call() -> tuple[float, float]:
    """By which a compiled function is slower if its calls are recorded, the least and the median, in processor time."""
    import torch
    import torch._dynamo

    from flopwatch.flops.tracing import regions
    from flopwatch.monitor.counting.calls import RootCalls

    met: list[Any] = []
    regions.install(regions)
    regions.listen(lambda region, args: met.append(region))
    tensor = torch.ones(4)
    torch.compile(lambda x: x + 1, backend="eager")(tensor)

    def plain(x: Any) -> Any:
        return x

    recorded, calls, slower = regions._listening(met[0], plain), RootCalls(), []
    for _ in range(REPEATS):
        bare = timed(plain, tensor)
        calls.start()
        slower.append(timed(recorded, tensor) - bare)
        calls.take()
    return min(slower), statistics.median(slower)


def timed(function: Any, argument: Any) -> float:
    began = time.thread_time()
    for _ in range(CALLS):
        function(argument)
    return (time.thread_time() - began) / CALLS


def in_a_process(backend: str, *, watched: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", folder if watched else "bare", "--backend", backend]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(train(given.backend, None if given.worker == "bare" else given.worker)))
        return
    pairs = [[in_a_process(given.backend, watched=way) for way in (False, True)] for _ in range(given.rounds)]
    names = {"compiler": "time in the compiler", "first_steps": "processor time of the first 4 steps", "peak": "memory"}
    for name, what in names.items():
        ratios = [watched[name] / bare[name] for bare, watched in pairs]
        print(f"{what}: {statistics.median(ratios):.3f} times bare ({min(ratios):.3f} to {max(ratios):.3f})")
    more = [(watched["peak"] - bare["peak"]) / 1024 for bare, watched in pairs]
    print(f"memory at its peak: {statistics.median(more):.0f} MiB more than bare ({min(more):.0f} to {max(more):.0f})")
    equal = all(bare[name] == watched[name] for bare, watched in pairs for name in ("graphs", "weights"))
    print(f"graphs and weights: {'equal' if equal else 'DIFFERENT'} in {len(pairs)} pairs")
    print(f"rows exact: {all(all(watched['exact']) for _, watched in pairs)}")
    least, median = seconds_per_call()
    print(f"a recorded call of compiled code: {least * 1e6:.2f} µs at least, {median * 1e6:.2f} µs in the median")


if __name__ == "__main__":
    main()
