"""What differential privacy costs: a sweep of standard training and three ways to clip the gradient of each sample.

python examples/dp_sgd.py
"""

import flopwatch

MATRIX = {
    "trainer": ["standard", "dpsgd", "ghost", "fast"],
    "model": ["tiny"],
    "batch_size": [4],
    "seq_len": [64],
    "steps": 5,
    "warmup_steps": 1,
}


def main() -> None:
    # Each trial runs in a process of its own. A second call finds the results in the folder and runs nothing.
    flopwatch.sweep.run(MATRIX, "runs/dp_sgd")
    trials = flopwatch.report.load("runs/dp_sgd")
    for trial in trials:
        cost = trial["hardware_flops"] / trial["model_flops"]
        print(
            f"{trial['trainer']}: executes {trial['hardware_flops']:,} FLOPs per step, {cost:.2f} times the "
            f"{trial['model_flops']:,} that training needs, in {1000 * trial['step_seconds_median']:.0f} ms."
        )
    print("For memory and a recommendation: flopwatch report runs/dp_sgd")


if __name__ == "__main__":
    main()
