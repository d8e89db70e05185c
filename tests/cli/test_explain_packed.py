"""What `explain` calls the FLOPs that are executed and not needed: each under its own name, and they add up."""

import re

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.records.run import Provenance, Row, RunStart
from support.make_run_log import write_log
from support.tiny_transformers import build

START = RunStart("s", 0.0, "out")
ORIGIN = Provenance(0, "smart", "trace", True, "full", 1.0)


def logged(tmp_path, **columns):
    steps = {"step": [1], "seconds": [0.5], "samples": [2], "tokens": [100], **columns}
    write_log(tmp_path / "training_log.jsonl", [START, ORIGIN, Row(1, 1.0, {}, steps=steps)])
    return tmp_path


def test_recomputation_and_pairs_across_documents_are_told_apart(flopwatch, tmp_path):
    folder = logged(tmp_path, real_tokens=[100], model_flops=[1000], hardware_flops=[1117], recompute_flops=[23])
    _, out, _ = flopwatch("explain", str(folder), "--step", "1")
    text = " ".join(out.split())
    assert "1.1170 x the model FLOPs" in text
    assert "23 recomputed (0.0230 x)" in text
    assert "94 for padding or pairs of positions in different documents (0.0940 x)" in text


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[6, 10], pytest.param([16], marks=pytest.mark.campaign)])
def test_the_pairs_of_a_real_packed_run_are_those_a_formula_gives(flopwatch, tmp_path, lengths):
    """Per pair, scores and their use: 2 products of 2 FLOPs x 32 features x 2 layers forward, twice that backward."""
    ids = torch.zeros(1, 16, dtype=torch.long)
    model, batch = build("llama"), {"input_ids": ids, "labels": ids}
    with TrainingMonitor(tmp_path, model=model, peak_flops_per_s=1e12) as monitor:
        for _ in range(8):
            with monitor.step(batch, lengths=lengths):
                model(**batch).loss.backward()
    text = " ".join(flopwatch("explain", str(tmp_path), "--step", "5")[1].split())
    found = re.findall(r"([\d,]+) for padding or pairs of positions in different documents", text)
    across = 16**2 - sum(length**2 for length in lengths)
    assert found == ([f"{across * 3 * (2 * 2 * 32 * 2):,}"] if across else [])
