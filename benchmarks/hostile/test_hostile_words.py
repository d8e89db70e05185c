"""A short run of benchmarks/hostile/hostile_words.py: hostile words end no sweep and change no number."""

import pytest

from hostile.hostile_words import OUTPUTS, check_real_sweep
from hostile.renders import check_renders
from hostile.texts import hostile_texts

TEXTS = list(hostile_texts(100, seed=1))


@pytest.mark.parametrize("first", range(4))
def test_words_in_every_field_through_every_renderer(tmp_path, first):
    check_renders(TEXTS[first::12][:6], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["a terminal"])
def test_a_real_sweep_of_trials_that_print_and_raise_them(tmp_path, monkeypatch, output):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    # The first is also the name of the sweep's folder: any bytes but the slash and NUL.
    check_real_sweep(tmp_path / "s", ["half \ud83d [/x]\x1b\n", *TEXTS[2:60:20]], OUTPUTS[output])
