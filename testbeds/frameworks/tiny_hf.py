"""The Hugging Face Trainer on the tiny run."""

import json

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from flopwatch.integrations.hugging_face import FlopwatchCallback
from testbeds.frameworks import tiny_run


def quick_callback(**options):
    """Without counting, for what does not concern FLOPs."""
    return FlopwatchCallback(mode="estimate", **options)


def in_order(kind):
    """The class with the rows in their order also where the Trainer has no setting for it."""
    if tiny_run.can_choose_order():
        return kind
    return type(kind.__name__, (kind,), {"_get_train_sampler": lambda self, *_: SequentialSampler(self.train_dataset)})


def hf_trainer(folder, *callbacks, model=None, kind=Trainer, **more):
    return in_order(kind)(
        model or tiny_run.model(),
        TrainingArguments(**tiny_run.training_arguments(folder, **more)),
        train_dataset=tiny_run.dataset(),
        eval_dataset=tiny_run.dataset()[:4],
        data_collator=tiny_run.collate,
        callbacks=list(callbacks),
    )


def logged_rows(folder):
    """The rows of the local log."""
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == "row"]
