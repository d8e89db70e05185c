"""Lightning on two ranks, also with a callback on rank 0 only; run by tests/integrations/test_many_ranks.py."""

import json
import os
import sys

import lightning.pytorch.callbacks as _callbacks
from lightning.pytorch.loggers import CSVLogger

from flopwatch.integrations.lightning import FlopwatchCallback
from testbeds.frameworks.tiny_lightning import ImageModule, lightning_trainer


class Result(_callbacks.Callback):
    """Says what a rank has logged while the process group still exists."""

    def on_fit_end(self, trainer, pl_module):
        seen = {"rank": trainer.global_rank, "steps": trainer.global_step, "keys": sorted(trainer.callback_metrics)}
        sys.stdout.write("RESULT " + json.dumps(seen) + "\n")
        sys.stdout.flush()
        trainer.strategy.barrier()
        if "launched" in sys.argv:
            os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    own = [FlopwatchCallback("log")] if "one callback" in sys.argv and os.environ["RANK"] == "0" else []
    several = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 1, "logger": CSVLogger("csv")}
    trainer = lightning_trainer("own", *own, Result(), **several)
    trainer.fit(ImageModule(), ImageModule.batches())
