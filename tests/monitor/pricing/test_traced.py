"""FLOPs of `model(batch)` in trainings whose steps are not counted as they run."""

import pytest

import flopwatch
from flopwatch.testing import FakeClock
from support.small_models import TINY_FLOPS_PER_TOKEN, TinyText, text_batch


class Attentive(TinyText):
    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.layer(self.embedding(input_ids))
        return {"loss": (x @ x.transpose(1, 2)).sum()}


class SlowToTrace(Attentive):
    """Each trace takes a minute."""

    clock = FakeClock()

    def forward(self, input_ids, attention_mask=None, labels=None):
        self.clock.advance(60.0)
        return super().forward(input_ids)


def flops_of(length):
    return TINY_FLOPS_PER_TOKEN * length + 3 * 2 * 16 * length**2


def padded(length, longest):
    batch = text_batch(1, longest)
    batch["attention_mask"][0, length:] = 0
    return batch


@pytest.mark.parametrize("kind", [Attentive, SlowToTrace])
def test_every_length_has_its_flops_without_padding(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("flopwatch.monitor.pricing.step_counter.obstacle", lambda: "the code is compiled")
    model, lengths = kind(), [(90, 100), (7, 12), (30, 31), (50, 77)]
    clock = SlowToTrace.clock
    with flopwatch.TrainingMonitor(tmp_path, model=model, clock=clock, strict=True) as monitor:
        for length, longest in lengths:
            with monitor.step(padded(length, longest)):
                pass

    assert monitor.summary.values["total/model_flops"] == sum(flops_of(length) for length, _ in lengths)


def test_rows_that_are_longer_than_all_before_have_their_flops_without_padding(tmp_path, monkeypatch):
    monkeypatch.setattr("flopwatch.monitor.pricing.step_counter.obstacle", lambda: "the code is compiled")
    model, lengths = Attentive(), [(7, 10), (300, 400), (20, 30)]
    with flopwatch.TrainingMonitor(tmp_path, model=model, strict=True) as monitor:
        for length, longest in lengths:
            with monitor.step(padded(length, longest)):
                pass

    assert monitor.summary.values["total/model_flops"] == sum(flops_of(length) for length, _ in lengths)
