"""The parts of `make campaign`. A command ends with another status than 0 if what it shows does not hold."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A command, by the arguments of `python` or `pytest`, and what it shows."""

    name: str
    command: str
    shows: str


PARTS = (
    Part("matrix", "-m matrix", "the portable suite with eleven releases of torch and Python (docs/versions.md)"),
    Part(
        "tests",
        "pytest -n 2 --dist loadfile -m 'campaign and not gpu'",
        "further cases of what CI tests with one or two",
    ),
    Part("architectures", "benchmarks/accuracy/more_architectures.py", "FLOPs of 45 more architectures are exact"),
    Part("published", "-m published", "rows of published tables agree with our FLOPs per token (docs/published.md)"),
    Part("zoo", "-m zoo", "counts, laws and padded batches of hundreds of architectures (docs/zoo.md)"),
    Part("start-cost", "benchmarks/startup/start_cost.py", "what counting costs in the first steps"),
    Part(
        "loops", "benchmarks/pages/loops_table.py", "no row of any loop that is called exact is wrong (docs/loops.md)"
    ),
    Part("late-changes", "benchmarks/late_changes.py", "trainings that change late are noticed"),
    Part("compiled", "benchmarks/compiled/trainings.py", "compiled trainings: rows called exact equal eager ones"),
    Part("harm-eager", "benchmarks/compiled/harm.py --backend aot_eager", "the monitor does not change compiled code"),
    Part("harm-inductor", "benchmarks/compiled/harm.py --backend inductor", "the same with inductor"),
    Part("counted-ranks", "benchmarks/ranks/counted_at_random.py --runs 200", "ranks counting other steps do not hang"),
    Part("live-formulas", "benchmarks/live_formulas.py --shapes 500", "FLOPs of new shapes, known after few counts"),
    Part("laws", "pytest -n 2 tests/flops/test_law.py", "50 random shapes of each architecture, predicted to the FLOP"),
    Part("kills", "benchmarks/reliability/kills.py --kills 50", "a killed training resumes with a right log"),
    Part(
        "disturbed-starts",
        "benchmarks/reliability/disturbed_starts.py --starts 100",
        "trainings with prod, det, svd and others end as they do alone",
    ),
    Part("long-run", "benchmarks/reliability/long_run.py --calls 2000000", "memory, log and time per call do not grow"),
    Part(
        "scale", "benchmarks/sweeps/scale.py --trials 10000", "the runner is as quick at the last trial as at the first"
    ),
    Part("isolation", "benchmarks/sweeps/isolation.py --trials 1000", "1,000 trials leave nothing behind"),
    Part("sweep-cost", "benchmarks/sweeps/trial_overhead.py --model tiny", "the cost per trial under every engine"),
    Part(
        "kills-local",
        "benchmarks/reliability/never_twice.py --engine local --kills 20",
        "runner, supervisor, guard, worker or all at once killed: nothing runs twice, is lost or left",
    ),
    Part("kills-slurm", "benchmarks/reliability/never_twice.py --engine slurm --kills 20", "the same under Slurm"),
    Part("kills-ray", "benchmarks/reliability/never_twice.py --engine ray --kills 20", "the same on a Ray cluster"),
    Part(
        "ray-outages",
        "benchmarks/reliability/ray_outages.py --kills 10",
        "raylet and GCS of a Ray cluster killed: all trials end, and none is lost that had not begun",
    ),
    Part("week", "benchmarks/sweeps/week.py --trials 20000", "a week of a sweep, with losses and killed runners"),
    Part("memory", "benchmarks/sweeps/memory.py", "a trial's memory equals the kernel's PSS"),
    Part(
        "processes",
        "benchmarks/sweeps/many_processes.py",
        "trials of several processes: figures and endings",
    ),
    Part("rank-overhead", "benchmarks/ranks/rank_overhead.py", "what the monitor costs two ranks"),
    Part("link-overhead", "benchmarks/ranks/rank_overhead.py --link", "what the reports between ranks cost"),
    Part("growth", "benchmarks/scale/growth.py", "what a window costs as ranks are added"),
    Part("elastic", "benchmarks/ranks/elastic_job.py", "goodput of a job whose workers are killed"),
    Part("teardowns", "benchmarks/ranks/teardowns.py --count 200", "200 teardowns end as without the monitor"),
    Part("store-dies", "benchmarks/ranks/store_dies.py", "no rank hangs when the job's store dies or freezes"),
    Part("goldens", "-m house.goldens compare --only texts large rows formulas endings", "nothing is said differently"),
)
