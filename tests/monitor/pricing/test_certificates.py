"""When counted steps make a row exact, and when they do not."""

from flopwatch.monitor.pricing.certificates import Certificates
from flopwatch.monitor.pricing.watched_step import StepCount
from flopwatch.records.flops import PhaseFlops

PRICED = PhaseFlops(100, 200)
MORE = PhaseFlops(150, 250)


def counted(phases, **options):
    return StepCount(phases, **options)


def test_three_counts_that_agree_hold_for_other_sizes_of_the_pattern():
    certificates = Certificates()
    for kind in ("small", "large", "small"):
        assert certificates.verdict("other", "pattern").reason is not None
        certificates.add(kind, "pattern", PRICED, counted(PRICED))

    assert certificates.verdict("other", "pattern").reason is None
    assert certificates.verdict("other", "another pattern").finding == "unseen"


def test_a_step_that_runs_more_has_the_cost_that_was_counted_twice():
    certificates = Certificates()
    certificates.add("kind", "pattern", PRICED, counted(MORE))
    once = certificates.verdict("kind", "pattern")
    certificates.add("kind", "pattern", PRICED, counted(MORE))
    twice = certificates.verdict("kind", "pattern")

    assert "only once" in once.reason
    assert twice.reason is None
    assert twice.count.phases == MORE


def test_counts_that_differ_are_an_estimate_with_its_range():
    certificates = Certificates()
    certificates.add("kind", "pattern", PRICED, counted(MORE))
    certificates.add("kind", "pattern", PRICED, counted(PhaseFlops(100, 201)))

    assert "between 301 and 400 FLOPs" in certificates.verdict("kind", "pattern").reason


def test_other_sizes_of_a_pattern_that_ran_more_are_told():
    certificates = Certificates()
    certificates.add("kind", "pattern", PRICED, counted(MORE))

    verdict = certificates.verdict("other size", "pattern")
    assert verdict.finding == "differs"
    assert "1.33" in verdict.reason


def test_ops_without_a_formula_are_named_as_a_lower_bound():
    certificates = Certificates()
    certificates.add("kind", "pattern", PRICED, counted(PRICED, uncounted=("svd",)))

    assert "svd" in certificates.verdict("kind", "pattern").reason


def test_a_count_that_could_not_tell_recomputation_apart_says_so():
    certificates = Certificates()
    for _ in range(2):
        certificates.add("kind", "pattern", PRICED, counted(MORE, doubt="may run again"))

    assert certificates.verdict("kind", "pattern").reason == "may run again"


def test_calls_that_were_seen_and_are_not_in_the_count_ran_elsewhere():
    certificates = Certificates()
    for _ in range(3):
        certificates.add("kind", "pattern", PRICED, counted(PhaseFlops(0, 0)))

    assert "another thread" in certificates.verdict("kind", "pattern").reason


def test_a_loss_from_other_products_is_told():
    certificates = Certificates()
    for _ in range(3):
        certificates.add("kind", "pattern", PRICED, counted(PRICED))
    certificates.look_at_graph("kind", 1, is_counted=True)
    certificates.look_at_graph("kind", 1, is_counted=False)
    assert certificates.verdict("kind", "pattern").reason is None
    certificates.look_at_graph("kind", 2, is_counted=False)

    assert "other matrix products" in certificates.verdict("kind", "pattern").reason


def test_layers_left_out_by_chance_show_in_the_number_of_operations():
    certificates = Certificates()
    certificates.add(("calls", 10), "pattern", PRICED, counted(MORE))
    alone = certificates.node_counts_determine_costs(("calls", 10))
    certificates.add(("calls", 7), "another", PRICED, counted(PRICED))
    certificates.add(("other calls", 10), "pattern", PRICED, counted(PhaseFlops(1, 2)))

    assert not alone  # no draw has shown there yet
    assert certificates.node_counts_determine_costs(("calls", 7))


def test_a_size_that_is_drawn_does_not_show_in_the_number_of_operations():
    certificates = Certificates()
    certificates.add(("calls", 10), "pattern", PRICED, counted(MORE))
    certificates.add(("calls", 7), "another", PRICED, counted(PRICED))
    certificates.add(("calls", 10), "pattern", PRICED, counted(PRICED))

    assert not certificates.node_counts_determine_costs(("calls", 10))
    assert not certificates.node_counts_determine_costs(("calls", 7))


def test_another_number_of_operations_at_the_same_cost_tells_nothing():
    certificates = Certificates()
    certificates.add(("calls", 10), "pattern", PRICED, counted(MORE))
    certificates.add(("calls", 11), "another", PRICED, counted(MORE))

    assert not certificates.node_counts_determine_costs(("calls", 10))
