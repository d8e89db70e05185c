"""The likeliest mistakes give one message of at most three lines that names the mend; docs/mistakes.md has them."""

import pytest

from support.mistakes import MISTAKES, PAGE, ROWS, STEPS, Mistake, Outcome, make, page, rows_on_screen


@pytest.fixture(scope="module")
def outcomes() -> dict[Mistake, Outcome]:
    return {mistake: make(mistake) for mistake in MISTAKES}


def test_every_mistake_gives_one_message_of_at_most_three_lines_that_names_the_mend(
    outcomes: dict[Mistake, Outcome],
) -> None:
    wrong = [
        (mistake.written, outcome.texts)
        for mistake, outcome in outcomes.items()
        if len(outcome.texts) != 1 or mistake.mend not in outcome.texts[0] or rows_on_screen(outcome.texts[0]) > ROWS
    ]
    assert wrong == []


def test_a_mistake_stops_a_command_and_never_a_training(outcomes: dict[Mistake, Outcome]) -> None:
    for mistake, outcome in outcomes.items():
        if mistake.train is not None:
            assert outcome.status == STEPS, mistake.written
        else:
            assert outcome.status in (1, 2), mistake.written
        assert "Traceback" not in "".join(outcome.texts), mistake.written


def test_the_page_shows_what_is_said_today(outcomes: dict[Mistake, Outcome]) -> None:
    assert len(MISTAKES) >= 25
    assert PAGE.read_text(encoding="utf-8") == page(outcomes), "run `python -m support.mistakes --update` in tests/"
