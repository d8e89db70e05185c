"""Which steps are counted in each mode, and what is done when the model changes."""

import itertools

import pytest

import flopwatch
from flopwatch.monitor.counting import step_counter
from flopwatch.testing import FakeClock, RecordingSink
from support.small_models import TINY_FLOPS_PER_TOKEN, TinyText, text_batch


class Attentive(TinyText):
    """Knows how often its forward was run; attention makes its formula quadratic."""

    runs = 0

    def forward(self, input_ids, attention_mask=None, labels=None):
        self.runs += 1
        x = self.layer(self.embedding(input_ids))
        return {"loss": (x @ x.transpose(1, 2)).sum()}


@pytest.fixture
def model():
    return Attentive()


def flops_of(length):
    return TINY_FLOPS_PER_TOKEN * length + 3 * 2 * 16 * length**2


class Run:
    def __init__(self, tmp_path, model, **options):
        self.model, self.sink, self.clock = model, RecordingSink(), FakeClock()
        options = {"strict": True, "log_every": 1, "config": {"warm_up_steps": 0}, **options}
        self.monitor = flopwatch.TrainingMonitor(
            tmp_path, model=model, sinks=[self.sink], peak_flops_per_s=1e12, clock=self.clock, **options
        )

    def train(self, steps, length=10):
        for number in steps:
            batch = text_batch(1, length)
            with self.monitor.step(batch, step=number):
                self.clock.advance(1.0)
                self.model(**batch)["loss"].backward()

    def records(self, kind):
        self.monitor.close()
        return [record for record in self.sink.records if record.type == kind]

    def flops(self):
        return [row.steps.get("model_flops", [None])[0] for row in self.records("row")]


@pytest.fixture
def counted(monkeypatch):
    """The steps that are counted, by their place in the run."""
    found = []
    begin = step_counter.StepCounter._begin_count

    def noted(self, step, **options):
        found.append(self._schedule.steps)
        begin(self, step, **options)

    monkeypatch.setattr(step_counter.StepCounter, "_begin_count", noted)
    return found


@pytest.mark.parametrize("mode", ["smart", "profiler", "estimate"])
def test_the_model_runs_only_when_the_training_runs_it(tmp_path, model, mode):
    run = Run(tmp_path, model, mode=mode)
    run.train(range(20))
    run.monitor.close()

    assert model.runs == 20


@pytest.mark.requirement("R10")
def test_the_first_steps_are_counted_ever_more_rarely(tmp_path, model, counted):
    run = Run(tmp_path, model)
    run.train(range(48))

    assert counted == [0, 1, 2, 4, 7, 11, 17, 26, 36, 47]
    assert run.flops() == [flops_of(10)] * 48


def test_every_step_is_counted_on_request(tmp_path, model, counted):
    run = Run(tmp_path, model, config={"count": "every"})
    run.train(range(20))
    run.monitor.close()

    assert counted == list(range(20))


@pytest.mark.parametrize(
    ("mode", "setting"), [("smart", "recalibration_frequency"), ("profiler", "flops_profile_freq")]
)
def test_no_more_steps_than_the_frequency_lie_between_two_counts(tmp_path, model, counted, mode, setting):
    run = Run(tmp_path, model, mode=mode, config={setting: 5})
    run.train(range(100))
    run.monitor.close()

    assert max(later - earlier for earlier, later in itertools.pairwise(counted)) == 5


def test_a_formula_gives_the_flops_of_lengths_between_the_counted_ones(tmp_path, model, counted):
    run = Run(tmp_path, model)
    lengths = [40, 7, 23, 31, 12, 19, 28, 35, *range(8, 40)]
    for number, length in enumerate(lengths):
        run.train([number], length)

    assert len(counted) < 15
    rows = run.records("row")
    assert [row.steps["model_flops"][0] for row in rows[-32:]] == [flops_of(length) for length in lengths[-32:]]
    assert all(row.exact for row in rows[-32:])


def test_a_length_beyond_the_counted_ones_is_counted_and_not_guessed(tmp_path, model, counted):
    run = Run(tmp_path, model)
    for number, length in enumerate([40, 7, 23, 31, 12, 19, 28, 35, 39, 41]):
        run.train([number], length)

    assert 8 not in counted
    assert counted[-1] == 9
    assert run.flops()[-2:] == [flops_of(39), flops_of(41)]


def test_a_frozen_layer_makes_another_kind_of_step_at_once(tmp_path, model):
    run = Run(tmp_path, model)
    run.train(range(9))
    model.embedding.weight.requires_grad_(False)  # the input's gradient is not needed any more
    run.train(range(9, 20))

    frozen = flops_of(10) - 2 * 16 * 16 * 10
    flops = run.flops()
    assert flops[:9] == [flops_of(10)] * 9
    assert set(flops[9:]) <= {frozen, None}
    assert flops[11:] == [frozen] * 9


def test_a_changed_forward_is_found_by_the_next_count_and_the_rows_before_it_are_doubted(tmp_path, model):
    """The number of recorded operations and all sizes are as before; only counting shows it."""
    run = Run(tmp_path, model, config={"warm_up_steps": 0, "recalibration_frequency": 4})
    run.train(range(13))

    def wider(input_ids, attention_mask=None, labels=None):
        x = model.layer(model.embedding(input_ids)).repeat(1, 2, 1)
        return {"loss": (x @ x.transpose(1, 2)).sum()}

    def as_before(input_ids, attention_mask=None, labels=None):
        x = model.layer(model.embedding(input_ids)).repeat(1, 1, 1)
        return {"loss": (x @ x.transpose(1, 2)).sum()}

    model.forward = as_before
    run.train(range(13, 40))
    model.forward = wider
    run.train(range(40, 50))

    doubt = next(notice for notice in run.records("notice") if notice.doubted and notice.step >= 39)
    first, last = doubt.doubted[0][0], doubt.doubted[-1][1]
    assert first <= 40 <= last + 1 <= 45, "from the last count that agreed to the first that does not"


def test_estimates_say_that_they_are(tmp_path, model):
    run = Run(tmp_path, model, mode="estimate")
    run.train(range(3))

    (provenance,) = run.records("provenance")
    assert provenance.method == "estimate"
    assert not provenance.exact
    assert all(row.notes == (step_counter.ESTIMATED,) and not row.exact for row in run.records("row"))


def test_a_loop_that_trains_nothing_gets_an_estimate_after_two_counts(tmp_path, model):
    run = Run(tmp_path, model)
    for number in range(6):
        run.monitor.log_step(number, batch=text_batch(1, 10))

    rows = run.records("row")
    assert [row.exact for row in rows] == [False] * 6
    assert rows[0].notes == (step_counter.NOTHING_RAN,)
    assert rows[-1].notes == (step_counter.NOTHING_RAN,)
    assert "model_flops" in rows[-1].steps


def test_without_calibration_only_the_first_steps_are_counted(tmp_path, model, counted):
    run = Run(tmp_path, model, config={"calibration_enabled": False, "recalibration_frequency": 0})
    run.train(range(150))
    run.monitor.close()

    assert max(counted) == 47


def test_provenance_is_written_once(tmp_path, model):
    run = Run(tmp_path, model)
    run.train(range(30))

    (provenance,) = run.records("provenance")
    assert (provenance.method, provenance.exact) == ("step", True)
