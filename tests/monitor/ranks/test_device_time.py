"""The rank whose device makes the others wait is named, with its cause; where that is not known, it is said why.

No GPU has run this. `Ranks` simulates devices that work behind their hosts and wait for each other as DDP does.
"""

import copy
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flopwatch import TrainingMonitor
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks.device_time import _NOT_SEEN
from flopwatch.monitor.ranks.job_values import StragglerHistory, job_values, straggler_values
from flopwatch.monitor.ranks.rank import Rank
from flopwatch.monitor.ranks.reports import Window, merge, report_of
from flopwatch.monitor.ranks.waits import NOT_REPLICATED, KnownWaits
from flopwatch.monitor.timing import tape as codes
from flopwatch.monitor.timing.divide import TapeDivision, times_of
from flopwatch.monitor.timing.hooks import PassHooks
from flopwatch.monitor.timing.tape import Tape
from flopwatch.testing import FakeClock
from support.torchrun import torchrun

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "ranks" / "straggler_devices.py"
FORWARD, BACKWARD, LOSS, OPTIMIZER, ALL_REDUCE = 0.030, 0.060, 0.004, 0.004, 0.002
STEP = FORWARD + BACKWARD + LOSS + OPTIMIZER + ALL_REDUCE
LATE = 0.1 * STEP
WINDOW_STEPS = 10


class Device:
    """Does what is queued after all that was queued before; a mark passes when the device gets there."""

    def __init__(self, clock):
        self._clock, self.ends = clock, 0.0

    def queue(self, seconds):
        self.ends = max(self.ends, self._clock()) + seconds

    def mark(self):
        self.queue(0.0)
        return self.ends

    def has_passed(self, mark):
        return True

    def seconds(self, start, end):
        return end - start


class OneRank:
    def __init__(self, number, ranks):
        self.clock = FakeClock()
        self.device = Device(self.clock)
        self.tape = Tape(self.device, self.clock)
        self.division = TapeDivision()
        self.rank = Rank(number, ranks, 0, lambda *_: None)
        self.rank.use_device_time().why_unknown = None

    def is_ready(self):
        self.clock.advance(max(0.0, self.device.ends - self.clock()))


class Ranks:
    """A training on several ranks whose loop waits for the device once per step, as with `loss.item()`.

    `kinds` are those of the modules that a step calls, as `PassHooks` notes them. `late` are the seconds by which a
    step takes longer on a rank, by cause. `jitter` is the standard deviation of every part of a step, and `spike` how
    often a step takes half as long again on one rank.
    """

    def __init__(self, count=2, seed=0, *, jitter=0.01, spike=0.0, kinds=(True,), broadcasts=True):
        self.ranks = [OneRank(number, count) for number in range(count)]
        self._chance, self._jitter, self._spike = random.Random(seed), jitter, spike
        self.kinds, self._broadcasts = kinds, broadcasts
        self.history, self.late = StragglerHistory(), {}
        self._number = 0

    def _work(self, one, seconds, cause="compute"):
        more = self.late.get((one.rank.rank, cause), 0.0)
        one.device.queue(seconds * max(0.2, self._chance.gauss(1, self._jitter)) + more)

    def _meet(self):
        """A collective: it ends on all ranks when the last one has come."""
        ends = max(one.device.mark() for one in self.ranks) + ALL_REDUCE / 2
        for one in self.ranks:
            one.device.ends = ends

    def step(self):
        for one in self.ranks:
            one.clock.advance(self.late.get((one.rank.rank, "input"), 0.0))
            one.tape.start_step()
            one.clock.advance(self.late.get((one.rank.rank, "host"), 0.0))
            if one.tape.times_parts:
                one.tape.add(codes.FORWARD)
                for kind in self.kinds:
                    one.tape.note(codes.KNOWS_WAITS, kind)
                if self._broadcasts:
                    one.tape.note(codes.RANKS)
        if self._broadcasts:
            self._meet()
        for one in self.ranks:
            if one.tape.times_parts and self._broadcasts:
                one.tape.add(codes.RANKS_END)
            self._work(one, FORWARD)
            self._mark(one, codes.FORWARD_END)
            self._work(one, LOSS, "loss")
            self._mark(one, codes.BACKWARD)
            spike = 0.5 * STEP if self._chance.random() < self._spike else 0.0
            self._work(one, BACKWARD + spike, "backward")
            self._mark(one, codes.RANKS)
        self._meet()
        for one in self.ranks:
            self._mark(one, codes.BACKWARD_END)
            one.tape.optimizer_begins()
            self._work(one, OPTIMIZER, "optimizer")
            one.tape.optimizer_ends()
            one.is_ready()
            one.tape.end_step()
            one.tape.begin_gap()
        self._number += 1

    def _mark(self, one, code):
        if one.tape.times_parts:
            one.tape.add(code)

    def window(self):
        """The report of all ranks on the next steps."""
        first = self._number
        for _ in range(WINDOW_STEPS):
            self.step()
        return merge([self._report(one, first) for one in self.ranks])

    def _report(self, one, first):
        divided = one.division.divide(one.tape.take()).steps
        steps = tuple(
            MeasuredStep(first + index, **times_of(parts, one.device.seconds)) for index, parts in enumerate(divided)
        )
        profile = one.rank.profile(Window(steps))
        return report_of(one.rank.rank, steps, peak_flops_per_s=None, profile=profile)

    def verdicts(self, windows):
        return [self.history.judge(self.window()) for _ in range(windows)]


SETTLING = 60
"""Windows after which the first 256 steps are over; from there one step of seven has marks around its passes."""


@pytest.mark.parametrize("broadcasts", [True, False], ids=["buffers", "no buffers"])
@pytest.mark.parametrize("cause", ["input", "compute", "host"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_late_by_a_tenth_of_the_step_is_named_with_its_cause(cause, ranks, broadcasts):
    training = Ranks(ranks, broadcasts=broadcasts)
    training.late[ranks - 1, cause] = LATE
    found = training.verdicts(20)[-10:]

    assert {(straggler.rank, straggler.cause) for straggler in found} == {(ranks - 1, cause)}
    assert found[-1].excess_share == pytest.approx(LATE / (STEP + LATE), rel=0.1)
    assert found[-1].chronic


def test_a_rank_that_becomes_slow_later_is_named_when_the_median_has_seen_it():
    training = Ranks()
    assert training.verdicts(SETTLING) == [None] * SETTLING
    training.late[1, "compute"] = LATE
    found = training.verdicts(60)

    assert found[0] is None
    assert {straggler.rank for straggler in found[-20:]} == {1}


@pytest.mark.parametrize(("ranks", "jitter"), [(2, 0.01), (2, 0.2), (8, 0.05)])
def test_no_rank_is_named_in_hundreds_of_windows_of_ranks_that_differ_by_chance(ranks, jitter):
    training = Ranks(ranks, seed=ranks, jitter=jitter, spike=0.01)

    assert training.verdicts(800 // ranks) == [None] * (800 // ranks)


def test_what_a_rank_waits_for_others_is_not_its_own_time():
    training = Ranks(jitter=0.0)
    training.late[1, "compute"] = LATE
    values = job_values([training.window() for _ in range(5)][-1], data_parallel_size=2)

    assert values["ranks/own_seconds_max"] - values["ranks/own_seconds_min"] == pytest.approx(LATE)
    assert values["ranks/own_seconds_max"] == pytest.approx(STEP + LATE - ALL_REDUCE)
    assert values["ranks/waiting_percent"] == pytest.approx(100 * (LATE / 2 + ALL_REDUCE) / (STEP + LATE))
    assert (values["ranks/slowest"], values["ranks/fastest"]) == (1, 0)


@pytest.mark.parametrize("kinds", [(None,), (True, None), (False,)], ids=["FSDP", "DDP and FSDP", "a bare module"])
def test_ranks_that_wait_inside_of_their_layers_are_judged_by_their_input_alone(kinds):
    training = Ranks(kinds=kinds)
    training.late[0, "compute"] = 3 * LATE
    assert training.verdicts(20) == [None] * 20

    training.late[1, "input"] = LATE
    report = [training.window() for _ in range(20)][-1]
    named = straggler_values(training.verdicts(2)[-1])
    assert (named["ranks/straggler"], "ranks/straggler_compute_percent" in named) == (1, False)
    assert named["ranks/straggler_input_percent"] == named["ranks/straggler_excess_percent"]
    assert not {"ranks/own_seconds_mean", "ranks/waiting_percent", "ranks/slowest"} & job_values(report, 2).keys()


def test_what_was_measured_long_ago_is_not_used():
    training = Ranks()
    training.late[1, "compute"] = LATE
    assert training.verdicts(20)[-1] is not None

    training.kinds = (None,)
    assert training.verdicts(20)[-1] is None
    assert {one.rank.device.why_unknown for one in training.ranks} == {_NOT_SEEN}


def test_a_collective_that_is_overlooked_names_nobody_wrongly():
    """The loop adds up its loss over the ranks between the passes, so that the fast rank waits there."""
    training = Ranks()
    between = training._mark

    def meet_before_backward(one, code):
        if code == codes.BACKWARD and one is training.ranks[-1]:
            training._meet()
        between(one, code)

    training._mark = meet_before_backward
    training.late[1, "compute"] = LATE
    assert {straggler.rank for straggler in training.verdicts(20) if straggler is not None} <= {1}


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield torch.distributed.new_group([0, 1])
    torch.distributed.destroy_process_group()


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))


def test_where_ranks_wait_is_known_of_ddp_alone(group):
    replicated = nn.parallel.DistributedDataParallel
    plain, with_buffers = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    waits = KnownWaits(4)
    assert waits.of(nn.CrossEntropyLoss()) == (False, None)
    assert waits.why_unknown == NOT_REPLICATED
    assert waits.of(replicated(plain)) == (True, None)
    assert waits.of(replicated(with_buffers)) == (True, with_buffers)
    without_broadcast = replicated(with_buffers)
    without_broadcast.broadcast_buffers = False
    assert waits.of(without_broadcast) == (True, None)
    assert waits.why_unknown is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda group: sharded(), "sharded"),
        (lambda group: nn.Sequential(nn.SyncBatchNorm(8)), "SyncBatchNorm"),
        (lambda group: nn.parallel.DistributedDataParallel(nn.Linear(8, 8), process_group=group), "2 of 4 ranks"),
        (lambda group: nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(8, 8))), "another module calls"),
    ],
    ids=["FSDP2", "SyncBatchNorm", "some of the ranks", "a module around DDP"],
)
def test_where_ranks_wait_elsewhere_too_the_reason_is_kept(group, make, why):
    waits = KnownWaits(4)
    waits.of(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)))
    assert waits.of(make(group)) is None
    assert why in waits.why_unknown


def test_ranks_that_share_a_batch_wait_for_each_other_in_every_layer(group):
    waits = KnownWaits(4)
    waits.ranks_per_batch = 2
    assert waits.of(nn.parallel.DistributedDataParallel(nn.Linear(8, 8))) is None
    assert "2 ranks share a batch" in waits.why_unknown


def test_compiled_code_inside_of_ddp_is_known_unless_buffers_are_broadcast(group):
    waits = KnownWaits(4)
    assert waits.of(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), is_region=True) == (True, None)
    assert waits.of(nn.parallel.DistributedDataParallel(nn.BatchNorm1d(8)), is_region=True) is None
    assert "forward_sync_buffers=False" in waits.why_unknown


def test_nothing_is_looked_for_on_a_cpu_or_on_one_rank(tmp_path):
    model = nn.Linear(8, 8)
    with TrainingMonitor(tmp_path, model=model, sinks=[]) as monitor, monitor.step(torch.ones(4, 8)):
        assert monitor._run._passes.waits is None
    assert Rank(0, 1, 0, lambda *_: None).use_device_time() is None


def test_the_reason_is_told_once_on_the_logging_rank():
    told = []
    rank = Rank(0, 2, 0, lambda *notice: told.append(notice))
    rank.use_device_time()
    rank.link = SimpleNamespace(send=lambda report: None)
    rank.send_window(Window((MeasuredStep(1, seconds=0.1, input_wait_seconds=0.0),)), None)

    assert [code for _, code, _ in told] == ["own_time_unknown"]
    assert NOT_REPLICATED in told[0][2]


@pytest.mark.parametrize("is_called", [True, False])
def test_the_wait_before_the_forward_pass_ends_with_the_module_inside_and_nothing_stays_on_that(group, is_called):
    inside = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    parallel = nn.parallel.DistributedDataParallel(inside)
    clock = FakeClock()
    tape = Tape(Device(clock), clock)
    hooks = PassHooks(tape)
    hooks.waits = KnownWaits(4)
    hooks.forward_begins(parallel)
    output = parallel(torch.ones(4, 8)) if is_called else None
    hooks.forward_ends(output)
    begins, ends = [codes.FORWARD, codes.KNOWS_WAITS, codes.RANKS], [codes.FORWARD_END]

    assert [code for code, *_ in tape.events] == begins + [codes.RANKS_END] * is_called + ends
    assert not inside._forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


class WaitingForRanks:
    """Calls of DistributedDataParallel that stop where it would wait for the other ranks before its forward pass."""

    def __init__(self, inside):
        self.inside, self.parallel = inside, nn.parallel.DistributedDataParallel(inside)
        clock = FakeClock()
        self.tape = Tape(Device(clock), clock)
        self._hooks = PassHooks(self.tape)
        self._hooks.waits = KnownWaits(4)

    def call(self, while_waiting):
        handle = self.parallel.register_forward_pre_hook(lambda *_: while_waiting(self.inside))
        self._hooks.forward_begins(self.parallel)
        try:
            self._hooks.forward_ends(self.parallel(torch.ones(4, 8)))
        finally:
            handle.remove()

    def hooks_left(self):
        return [*torch.nn.modules.module._global_forward_pre_hooks, *self.inside._forward_pre_hooks]


@pytest.mark.parametrize("use", [copy.deepcopy, torch.fx.symbolic_trace, lambda inside: inside])
def test_the_module_inside_can_be_copied_and_saved_while_its_rank_waits(group, use):
    waiting = WaitingForRanks(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    saved = []
    waiting.call(lambda inside: saved.append(pickle.dumps(use(inside))))

    assert b"flopwatch" not in saved[0]
    assert [code for code, *_ in waiting.tape.events][-2:] == [codes.RANKS_END, codes.FORWARD_END]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_hook_stays_when_the_wait_was_interrupted(group, error):
    def interrupt(_):
        raise error

    waiting = WaitingForRanks(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    with pytest.raises(error):
        waiting.call(interrupt)
    assert b"flopwatch" not in pickle.dumps(waiting.inside)
    waiting.tape.end_step()
    waiting.tape.start_step()
    waiting.call(lambda _: None)

    assert waiting.hooks_left() == []
    assert [code for code, *_ in waiting.tape.events].count(codes.RANKS_END) == 1


def test_a_wait_whose_end_was_not_seen_is_unknown():
    training = Ranks(broadcasts=False)
    mark = training._mark

    def begin_to_wait_only(one, code):
        if code == codes.FORWARD_END:
            one.tape.note(codes.RANKS)
        mark(one, code)

    training._mark = begin_to_wait_only
    assert [training.window().profile.compute for _ in range(10)] == [None] * 10


@pytest.mark.slow
def test_real_ddp_waits_where_it_is_looked_for(tmp_path):
    """Two gloo ranks; the events are readings of the host's clock, and rank 1 sleeps 20 % longer."""
    cases, windows = {"input", "backward", "host"}, 4
    options = ["--folder", str(tmp_path), "--delay-share", "0.2", "--windows", str(windows), "--cases", *cases]
    found = torchrun(BENCHMARK, *options, ranks=2)[0]["found"]

    assert found.keys() == cases
    for numbers in found.values():
        assert numbers["own seconds"] == numbers["windows"] == windows
        assert numbers["right cause"] >= windows - 1, "a busy machine may hold up a rank in a window"
        assert numbers["wrong"] == 0
