"""The small parts the integrations share, and what their modules load."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("hugging_face", ["transformers"], "hf"),
        pytest.param("lightning", ["lightning", "pytorch_lightning"], "lightning", marks=pytest.mark.campaign),
    ],
)
def test_a_missing_package_names_its_extra(module, missing, extra):
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    code = f"import sys; {blocked}; import flopwatch.integrations.{module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDependencyError" in result.stderr
    assert f'pip install "flopwatch[{extra}]"' in result.stderr


def test_a_method_replaced_again_by_somebody_else_is_left_to_them():
    from flopwatch.integrations.callback_parts import replace_method

    class Trainer:
        def training_step(self):
            return ["trainer"]

    trainer = Trainer()
    put_back = replace_method(trainer, "training_step", lambda original: ["ours", *original()])
    ours = trainer.training_step
    trainer.training_step = lambda: ["theirs", *ours()]
    put_back()
    assert trainer.training_step() == ["theirs", "ours", "trainer"]


def test_a_method_that_was_on_the_object_before_comes_back():
    from flopwatch.integrations.callback_parts import replace_method

    class Trainer:
        pass

    trainer = Trainer()
    trainer.training_step = theirs = lambda: "theirs"
    replace_method(trainer, "training_step", lambda original: "ours")()
    assert trainer.training_step is theirs
