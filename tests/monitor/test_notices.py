"""The texts of notices stand in a table; who gives a notice gives the facts that its text names."""

import ast
from pathlib import Path
from string import Formatter

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.monitor import notices


def given_facts():
    """The names of the facts with which the package gives each notice, by its code."""
    for file in Path(flopwatch.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "notice" in (
                getattr(node.func, "attr", ""),
                getattr(node.func, "id", ""),
            ):
                code = next(part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
                yield code.rstrip(":"), {keyword.arg for keyword in node.keywords}


@pytest.mark.slow
def test_every_notice_of_the_table_is_given_with_the_facts_of_its_text():
    texts = notices._INFOS | notices._WARNINGS
    wanted = {
        code: {name.partition(".")[0] for _, name, _, _ in Formatter().parse(text) if name}
        for code, text in texts.items()
    }
    given = list(given_facts())
    assert given
    assert {code for code, _ in given} == set(texts)
    assert [(code, facts) for code, facts in given if facts != wanted[code]] == []


@pytest.mark.parametrize(("steps", "is_told"), [(3, True), (6, False)])
def test_a_run_whose_steps_were_all_counted_says_that_the_time_of_counting_is_unknown(steps, is_told, tmp_path):
    model = nn.Linear(8, 8)
    with flopwatch.TrainingMonitor(tmp_path, model=model, quiet=True) as monitor:
        for batch in torch.randn(steps, 4, 8):
            with monitor.step(batch):
                model(batch).sum().backward()
    assert ("counting_time_unknown" in monitor.summary.notices) == is_told
    assert ("time/count_seconds" in monitor.summary.values) != is_told


class Attention(nn.Module):
    def __init__(self, is_fused):
        super().__init__()
        self.project, self.is_fused = nn.Linear(8, 8), is_fused

    def forward(self, x):
        x = self.project(x)[:, None]
        if self.is_fused:
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        hidden = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).triu(1)
        return (x @ x.transpose(2, 3)).masked_fill(hidden, -torch.inf).softmax(-1) @ x


@pytest.mark.parametrize(("is_fused", "convention"), [(True, "causal"), (False, "full")])
def test_attention_by_hand_whose_mask_is_not_seen_is_not_called_causal(is_fused, convention, tmp_path):
    model = Attention(is_fused)
    with flopwatch.TrainingMonitor(tmp_path, model=model, attention="causal", quiet=True) as monitor:
        for batch in torch.randn(6, 4, 16, 8):
            with monitor.step(batch):
                model(batch).sum().backward()
    assert flopwatch.runs.read_log(tmp_path / "training_log.jsonl").provenances[-1].attention == convention
    assert ("not_causal" in monitor.summary.notices) == (not is_fused)
