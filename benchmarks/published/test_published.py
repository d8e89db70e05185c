"""The page belongs to the data, and counting again gives the stored counts. `python -m published` counts all models."""

from dataclasses import replace

import pytest

from published import verdicts as judging
from published.__main__ import FEWEST_ROWS, LEAST_SHARE
from published.counts import Counts, built, by_law, counted, law_of
from published.models import MODELS
from published.page import END, PAGE, START, section
from published.rows import all_rows
from published.verdicts import of_group, tally, verdicts


@pytest.fixture(scope="module")
def found():
    return verdicts(all_rows(), Counts(afresh=False))


def part(page):
    text = page.read_text("utf-8")
    begin = text.index(START) + len(START)
    return text[begin : text.index(END, begin)].strip()


def test_the_page_belongs_to_the_data(found):
    assert part(PAGE) == section(found), "run: PYTHONPATH=benchmarks python -m published --stored"


def test_enough_rows_agree(found):
    stated = tally([*of_group(found, "stated"), *of_group(found, "own term")])

    assert len(found) >= FEWEST_ROWS
    assert stated.unrounded_within / stated.unrounded >= LEAST_SHARE
    assert all(each.reason for each in found if not each.is_within)


def test_a_wrong_count_is_noticed(found, monkeypatch):
    class OnePercentMore(Counts):
        def of(self, model, length, attention):
            count = super().of(model, length, attention)
            more = {name: flops * 1.01 for name, flops in count.by_convention.items()}
            return replace(count, flops=count.flops * 1.01, by_convention=more)

    stated = tally(of_group(verdicts(all_rows(), OnePercentMore(afresh=False)), "stated"))

    assert stated.unrounded_within < 0.05 * stated.unrounded


def test_rounding_is_a_reason_only_as_far_as_it_reaches(found):
    row = next(each for each in found if each.is_within and each.row.release == "26.06")
    published = row.flops_per_token * row.row.tokens_per_s / 1e12
    rows = [replace(row.row, published=published * factor, half_digit=0.002 * published) for factor in (1.006, 1.01)]
    slightly, far = judging.verdicts(rows, Counts(afresh=False))

    assert "digits are rounded" in slightly.reason
    assert far.reason == judging.UNEXPLAINED


def test_releases_whose_tokens_are_multiples_of_eight_are_rounded():
    rounded = {row.release for row in all_rows() if row.is_rounded}

    assert rounded == {"26.04.01", "26.06.01", "26.08"}


def test_figures_in_brackets_are_compared_too(found):
    both = next(each for each in found if each.row.readings)
    alone = replace(both.row, readings=())
    wrong = replace(both.row, readings=((both.row.readings[0][0], 2 * both.row.readings[0][1]),))

    assert [each.is_within for each in verdicts([alone, wrong], Counts(afresh=False))] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "length", "attention"),
    [
        ("MPT 125m", 1024, "full"),  # llm-foundry
        ("Llama 3 8B", 8192, "causal"),  # megatron, maxtext
        ("Llama 3 8B", 8192, "full"),  # torchtitan
        ("Qwen2.5 7B", 4096, "causal"),  # Automodel's factor for LoRA
        ("Qwen3 30B", 4096, "causal"),  # experts
        ("GPT-OSS 20B, heads of 45", 4096, "causal"),  # sinks, windows, experts
    ],
)
def test_counting_again_gives_the_stored_count(found, model, length, attention):
    is_by_law = MODELS[model].learned_positions
    again = by_law(law_of(model), model, length) if is_by_law else counted(model, length, attention)

    assert again == Counts(afresh=False).of(model, length, attention)
    assert any(each.is_within for each in found if each.case is not None and each.case.model == model)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["MPT 125m", "MPT 3b", "MPT 70b"])
def test_the_models_have_the_published_number_of_parameters(model):
    row = next(row for row in all_rows() if row.model == model)

    assert sum(each.numel() for each in built(model, row.length).parameters()) == row.parameters
