import math

import pytest

from flopwatch.errors import InputError
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.spec.names import trial_names
from flopwatch.sweep.spec.parsing import parse_bytes, parse_overrides

DOCUMENT = {
    "trainer": "StandardTrainer,DPSGDTrainer,DPGhostClippingTrainer,DPFastGradientClippingTrainer",
    "batch_size": "4,8",
    "seq_len": [512, 1024],
    "model_size": "1b",
}


def names_of(settings):
    return trial_names(expand(read_matrix(None, settings)))


@pytest.mark.requirement("R23", "R25")
def test_the_documents_matrix_has_sixteen_trials_with_the_documents_names():
    names = names_of(DOCUMENT)
    assert len(names) == 16
    assert "StandardTrainer_bs4_seq512" in names
    assert "DPFastGradientClippingTrainer_bs8_seq1024" in names


@pytest.mark.requirement("R27")
def test_a_file_and_settings_over_it(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "trainer: [standard, ghost]\nbatch_size: [1, 2]\nseq_length: 64\nmodel_size: tiny\nmemory: 2GiB\ntimeout: 30m\n"
    )
    specs = expand(read_matrix(file, {"batch_size": [16]}))
    assert [(spec.trainer, spec.batch_size) for spec in specs] == [("standard", 16), ("ghost", 16)]
    assert (specs[0].seq_len, specs[0].model) == (64, "tiny"), "as docs/requirements.md spells them"
    assert (specs[0].limits.memory_bytes, specs[0].limits.wall_seconds) == (2 * 2**30, 1800)


def test_what_else_varies_stands_in_the_name():
    names = names_of(
        {
            "model": ["tiny", "small"],
            "dtype": ["fp32", "bf16"],
            "checkpointing": [False, True],
            "batch_size": 4,
            "seq_len": 8,
        }
    )
    assert names[0] == "StandardTrainer_bs4_seq8_tiny_fp32"
    assert "StandardTrainer_bs4_seq8_small_bf16_ckpt" in names
    assert len(set(names)) == 8


def test_a_list_among_the_options_is_an_axis():
    specs = expand(
        read_matrix(None, {"options": {"lr": [0.1, 0.2], "max_grad_norm": 1.0}, "batch_size": 1, "seq_len": 8})
    )
    assert [spec.options for spec in specs] == [{"lr": 0.1, "max_grad_norm": 1.0}, {"lr": 0.2, "max_grad_norm": 1.0}]
    assert trial_names(specs) == ["StandardTrainer_bs1_seq8_lr0.1", "StandardTrainer_bs1_seq8_lr0.2"]


def test_a_list_among_the_options_of_one_trainer_is_an_axis_of_this_trainer():
    trainers = ["standard", {"trainer": "mine:A", "options": {"rank": [4, 8], "sizes": [[1, 2]]}}]
    specs = expand(read_matrix(None, {"trainer": trainers, "batch_size": 1, "seq_len": 8}))
    assert [spec.options for spec in specs] == [{}, {"rank": 4, "sizes": [1, 2]}, {"rank": 8, "sizes": [1, 2]}]
    assert trial_names(specs)[1:] == ["A_bs1_seq8_rank4", "A_bs1_seq8_rank8"]


def test_excluded_trials_are_left_out():
    settings = {**DOCUMENT, "exclude": ["trainer=ghost seq_len>=1024", {"batch_size": ">4", "trainer": "DPSGDTrainer"}]}
    names = names_of(settings)
    assert len(names) == 12
    assert not any(name.startswith("DPGhost") and name.endswith("1024") for name in names)
    assert not any(name.startswith("DPSGD") and "bs8" in name for name in names)


def test_a_value_named_twice_is_one_trial():
    assert len(names_of({"batch_size": [4, 4], "seq_len": [8]})) == 1


def test_models_with_the_same_word_get_different_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "llama").mkdir(parents=True)
    models = [str(tmp_path / name / "llama" / "config.json") for name in ("a", "b")]
    names = names_of({"model": models, "batch_size": 1, "seq_len": 8})
    assert len(set(names)) == 2
    assert all(name.startswith("StandardTrainer_bs1_seq8_llama_") for name in names)


@pytest.mark.parametrize("hostile", ["../../etc/passwd", "a\nb", "it's", 'say "hi"', "🔥", "", ".", "a/b", " x", "-x"])
def test_a_label_that_is_no_file_name_is_refused(hostile):
    with pytest.raises(InputError, match="cannot be part of a file name"):
        names_of({"trainer": [{"label": hostile or " ", "command": "true"}]})


@pytest.mark.parametrize("model", ["../../x.json", "a b\n.json", "🔥.json", "'quoted'.json", "mod.sub:build"])
def test_a_models_path_becomes_a_harmless_part_of_the_name(model):
    for name in names_of({"model": ["tiny", model], "batch_size": 1, "seq_len": 8}):
        assert not set(name) & set("/\n'\"🔥: "), name
        assert ".." not in name.split("_")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"batch_size": []}, "no trial is left to run: a setting is an empty list"),
        ({"batch_size": [0]}, "batch_size.0: Input should be greater than or equal to 1, got 0"),
        ({"batch_size": ["many"]}, "batch_size.0"),
        ({"batchsize": 4}, "there is no setting 'batchsize'; did you mean 'batch_size'"),
        ({"trainer": ["gost"]}, "did you mean 'ghost'"),
        ({"trainer": [{"label": "x"}]}, "needs a command"),
        ({"trainer": [{"command": " "}]}, "the command of a trainer is empty"),
        ({"trainer": [{"trainer": "ghost", "command": "true"}]}, "has both a name and a command"),
        ({"memory": "lots"}, "not an amount of memory"),
        ({"timeout": math.inf}, "is not a duration"),
        ({"gpus": 0.5}, "valid integer"),
        ({"repeats": 3, "seed": [1, 2]}, "`repeats` and `seed` both say how often each trial runs"),
        ({"budget": "0"}, "a duration of '0' leaves no time to run anything"),
        ({"exclude": ["speed>3"]}, "cannot name 'speed'"),
        ({"exclude": ["batch_size>=1"]}, "`exclude` removes all trials; exclude fewer"),
        ({"batch_size": list(range(1, 400)), "seq_len": list(range(1, 400))}, "more than the limit of 100,000"),
    ],
)
def test_a_matrix_that_cannot_be_is_refused_by_its_key(settings, told):
    with pytest.raises(InputError) as caught:
        expand(read_matrix(None, settings))
    assert told in str(caught.value)


@pytest.mark.parametrize("content", ["[1, 2]", "trainer: [", "just words"])
def test_a_file_that_is_no_matrix_is_refused(tmp_path, content):
    file = tmp_path / "sweep.yaml"
    file.write_text(content)
    with pytest.raises(InputError, match=r"sweep\.yaml"):
        read_matrix(file, {})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", r"sweep\.yaml is empty; write settings into it"),
        ("# nothing\n", r"sweep\.yaml is empty"),
    ],
)
def test_a_file_that_is_no_matrix_says_what_is_wrong(tmp_path, content, told):
    file = tmp_path / "sweep.yaml"
    file.write_text(content)
    with pytest.raises(InputError, match=told):
        read_matrix(file, {})


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot read the matrix"):
        read_matrix(tmp_path / "none.yaml", {})


def test_a_silent_command_is_not_taken_for_a_hang():
    command, ours = expand(
        read_matrix(None, {"trainer": [{"command": "true"}, "standard"], "batch_size": 1, "seq_len": 1})
    )
    assert command.limits.no_progress_seconds is None
    assert ours.limits.no_progress_seconds == 600


def test_words_are_read_as_yaml_and_a_dot_stands_for_a_mapping():
    assert parse_overrides(["seed=1,2,4", "device=cpu", "options.lr=1e-3", "trace=false"]) == {
        "seed": [1, 2, 4],
        "device": "cpu",
        "options": {"lr": 0.001},
        "trace": False,
    }


def test_repeats_are_runs_with_other_seeds():
    specs = expand(read_matrix(None, {"repeats": 3, "batch_size": 1, "seq_len": 8}))
    assert [spec.seed for spec in specs] == [0, 1, 2]


def test_a_command_stands_alone_or_beside_named_trainers():
    def of(settings):
        specs = expand(read_matrix(None, {"command": "true", "batch_size": 1, "seq_len": 8, **settings}))
        return [(spec.trainer, spec.command) for spec in specs]

    assert of({}) == [("command", "true")]
    assert of({"trainer": "ghost"}) == [("ghost", None), ("command", "true")]


@pytest.mark.parametrize("word", ["batch_size", "=4", "batch_size="])
def test_half_an_override_is_refused(word):
    with pytest.raises(InputError, match="is not a setting"):
        parse_overrides([word])


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 2**30), ("1GB", 10**9), ("1.5m", 1572864), (7000, 7000), ("7000", 7000), (None, None)]
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["-1", "0", "GiB", "1 XB", True])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(InputError):
        parse_bytes(text)
