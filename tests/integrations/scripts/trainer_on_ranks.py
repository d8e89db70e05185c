"""The Hugging Face Trainer on several ranks with the callback; run by tests/integrations/test_many_ranks.py."""

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from flopwatch.integrations.hugging_face import FlopwatchCallback
from testbeds.architectures import BY_NAME

STEPS, BATCH_SIZE, SEQ_LEN = 20, 2, 16


def main(folder: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (64, SEQ_LEN))
    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer",
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        logging_steps=5,
        save_steps=10,
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = FlopwatchCallback(folder)
    data = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model=BY_NAME["llama"].build(), args=arguments, train_dataset=data, callbacks=[callback]).train()
    summary = None if callback.monitor is None else callback.monitor.summary
    result = {"rank": dist.get_rank(), "values": None if summary is None else dict(summary.values)}
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(sys.argv[1])
