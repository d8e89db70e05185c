"""A run of W&B for each trial of a sweep: its settings as config, what was measured as summary.

python examples/trials_to_wandb.py runs/dp_sgd my-project

The sweep is that of dp_sgd.py; any folder that `flopwatch sweep` wrote will do. Run it again to update the same runs.
`report.load` gives one dict per trial, so the same loop serves any other tracker: with MLflow, `mlflow.log_params` of
the settings, and `mlflow.log_metrics` of the numbers in `measured`.
"""

import sys
from pathlib import Path

import wandb

from flopwatch import report


def main(folder: str, project: str) -> None:
    sweep = Path(folder).resolve().name
    columns = [column.name for column in report.COLUMNS]
    settings = columns[: columns.index("outcome")]  # the settings of a trial stand before what became of it
    table = report.load(folder)
    for row in table:
        known = {name: value for name, value in row.items() if value is not None}
        measured = {name: value for name, value in known.items() if name not in settings}
        with wandb.init(
            project=project,
            id=f"{sweep}-{row['key'] or row['trial']}",  # the same id updates the run that was logged before
            resume="allow",
            name=row["trial"],
            group=sweep,
            tags=[row["outcome"]],
            config={name: value for name, value in known.items() if name in settings or name.startswith("options.")},
            settings=wandb.Settings(console="off", x_disable_stats=True),  # this process is not the trial
        ) as run:
            run.summary.update(measured)
    print(f"{len(table)} trials are in the project {project} of W&B")


if __name__ == "__main__":
    main(*sys.argv[1:3])
