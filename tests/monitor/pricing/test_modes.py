"""When FLOPs are counted, when they are only looked up, and what is done when the model changes."""

import pytest
import torch

import flopwatch
from flopwatch.monitor.pricing import law_book
from flopwatch.testing import FakeClock, RecordingSink
from support.small_models import TINY_FLOPS_PER_TOKEN, TinyText, text_batch


class Counted(TinyText):
    """Knows how often its forward was run, by the training or by a count; attention makes its law quadratic."""

    runs = 0

    def forward(self, input_ids, attention_mask=None, labels=None):
        type(self).runs += 1
        x = self.layer(self.embedding(input_ids))
        return {"loss": (x @ x.transpose(1, 2)).sum()}


@pytest.fixture
def model():
    Counted.runs = 0
    return Counted()


def flops_of(length):
    return TINY_FLOPS_PER_TOKEN * length + 3 * 2 * 16 * length**2


class Run:
    def __init__(self, tmp_path, model, **options):
        self.sink = RecordingSink()
        self.clock = FakeClock()
        options = {"strict": True, "log_every": 1, "clock": self.clock, "config": {"warm_up_steps": 0}, **options}
        self.monitor = flopwatch.TrainingMonitor(
            tmp_path, model=model, sinks=[self.sink], peak_flops_per_s=1e12, **options
        )

    def log(self, steps, length=10):
        for number in steps:
            self.clock.advance(1.0)
            self.monitor.log_step(number, batch=text_batch(1, length))

    def records(self, kind):
        self.monitor.close()
        return [record for record in self.sink.records if record.type == kind]


def test_smart_counts_once_and_prices_every_shape(tmp_path, model):
    run = Run(tmp_path, model, mode="smart")
    run.log([0], length=40)
    counted = Counted.runs
    for number, length in enumerate([40, 7, 23, 40, 12], start=1):
        run.log([number], length)

    assert Counted.runs == counted, "no shape inside the verified range is counted again"
    assert [row.steps["model_flops"][0] for row in run.records("row")] == [
        flops_of(length) for length in (40, 40, 7, 23, 40, 12)
    ]


@pytest.mark.slow
def test_smart_verifies_lengths_beyond_its_range_with_one_count_per_doubling(tmp_path, model):
    run = Run(tmp_path, model)
    run.log([0], length=10)
    counted = Counted.runs
    for number, length in enumerate(range(20, 120, 2), start=1):
        run.log([number], length)

    assert Counted.runs - counted <= 5 * 5, (
        "each doubling is verified at its own length and at neighbours of both parities"
    )
    rows = run.records("row")
    assert [row.steps["model_flops"][0] for row in rows[1:]] == [flops_of(length) for length in range(20, 120, 2)]


@pytest.mark.parametrize(
    ("mode", "frequency"),
    [("smart", 30), *(pytest.param(mode, 20, marks=pytest.mark.slow) for mode in ("profiler", "hybrid"))],
)
@pytest.mark.requirement("R10")
def test_a_model_that_changes_is_counted_anew_at_the_next_window(tmp_path, model, mode, frequency):
    config = {"warm_up_steps": 0, "recalibration_frequency": 30, "flops_profile_freq": 20}
    run = Run(tmp_path, model, mode=mode, config=config)
    run.log(range(10))
    model.embedding.weight.requires_grad_(False)  # the input's gradient is not needed any more
    run.log(range(10, 41))
    flops = [row.steps["model_flops"][0] for row in run.records("row")]

    frozen = flops_of(10) - 2 * 16 * 16 * 10
    assert flops[9] == flops_of(10)
    assert flops[11] == frozen
    provenances = [record for record in run.sink.records if record.type == "provenance"]
    assert len(provenances) == 2, "what the numbers rest on is written once and on change"


def test_a_changed_forward_is_found_by_the_check_itself(tmp_path, model):
    """Nothing about the parameters tells; only counting does."""
    run = Run(tmp_path, model, mode="profiler", config={"warm_up_steps": 0, "flops_profile_freq": 10})
    run.log(range(5))
    model.forward = lambda input_ids, attention_mask=None, labels=None: {
        "loss": model.layer(model.layer(model.embedding(input_ids))).sum()
    }
    run.log(range(5, 15))

    flops = [row.steps["model_flops"][0] for row in run.records("row")]
    assert flops[4] == flops_of(10)
    assert flops[7:] == [2 * TINY_FLOPS_PER_TOKEN * 10] * 8
    notices = [r.message for r in run.sink.records if r.type == "notice" and r.code != "not_exact"]
    assert ["counted again" in message for message in notices] == [True]


def test_estimate_never_runs_the_model(tmp_path, model):
    run = Run(tmp_path, model, mode="estimate")
    run.log(range(50))

    assert Counted.runs == 0
    (provenance,) = run.records("provenance")
    assert provenance.method == "estimate"
    assert not provenance.exact


def test_without_initial_profiling_it_is_estimated_first_and_counted_later(tmp_path, model):
    config = {"warm_up_steps": 0, "initial_profiling": False, "recalibration_frequency": 20}
    run = Run(tmp_path, model, config=config)
    run.log(range(20))
    assert Counted.runs == 0
    run.log(range(20, 30))

    methods = [record.method for record in run.records("provenance")]
    assert methods == ["estimate", "trace"]


def test_without_calibration_the_law_is_never_checked(tmp_path, model):
    config = {"warm_up_steps": 0, "calibration_enabled": False, "recalibration_frequency": 10}
    run = Run(tmp_path, model, config=config)
    run.log([0])
    counted = Counted.runs
    run.log(range(1, 50))
    run.monitor.close()
    assert Counted.runs == counted


def test_hybrid_says_that_it_reads_no_counters(tmp_path, model):
    run = Run(tmp_path, model, mode="hybrid")
    run.log([0])
    (provenance,) = run.records("provenance")
    assert "no hardware counters" in provenance.notes[0]
    assert provenance.mode == "hybrid"


def test_hybrid_without_a_fallback_is_refused(tmp_path, model):
    with pytest.raises(flopwatch.InputError, match="fallback_to_profiler"):
        Run(tmp_path, model, mode="hybrid", config={"fallback_to_profiler": False})


def test_counting_new_kinds_of_batches_stops_when_it_has_had_its_share(tmp_path):
    clock = FakeClock()

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            clock.advance(5.0)
            return self.layer(x)

    model = Slow()
    sink = RecordingSink()
    monitor = flopwatch.TrainingMonitor(
        tmp_path, model=model, sinks=[sink], clock=clock, strict=True, log_every=1, peak_flops_per_s=1e12
    )
    for number in range(30):
        clock.advance(1.0)
        monitor.log_step(number, batch=torch.randn(2, 1 + number, 8))  # each a kind of its own
    monitor.close()

    assert monitor.count_seconds < 150
    counted = [row.steps["model_flops"][0] for row in sink.records if row.type == "row" and "model_flops" in row.steps]
    assert 1 < len(counted) < 30
    notices = [record.code for record in sink.records if record.type == "notice" and record.code != "not_exact"]
    assert notices == ["shapes_not_counted"], "said once"


@pytest.mark.slow
def test_checks_take_at_most_their_share_of_the_run(tmp_path):
    clock = FakeClock()

    class Slow(TinyText):
        def forward(self, input_ids, attention_mask=None, labels=None):
            clock.advance(0.1)
            return super().forward(input_ids)

    model = Slow()
    run = Run(tmp_path, model, clock=clock, config={"warm_up_steps": 0, "recalibration_frequency": 1})
    run.clock = clock
    run.log([1])
    first = run.monitor.count_seconds
    run.log(range(2, 1000))
    run.monitor.close()

    checked = run.monitor.count_seconds - first
    assert 0 < checked <= law_book._SHARE_FOR_CHECKS * clock() + 0.11, "the share, and the check that used it up"
