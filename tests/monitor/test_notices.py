"""The texts of notices stand in a table; who gives a notice gives the facts that its text names."""

import ast
from pathlib import Path
from string import Formatter

import flopwatch
from flopwatch.monitor import output


def given_facts():
    """The names of the facts with which the package gives each notice, by its code."""
    for file in Path(flopwatch.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "notice":
                yield node.args[0].value, {keyword.arg for keyword in node.keywords}


def test_every_notice_of_the_table_is_given_with_the_facts_of_its_text():
    texts = output._INFOS | output._WARNINGS
    wanted = {
        code: {name.partition(".")[0] for _, name, _, _ in Formatter().parse(text) if name}
        for code, text in texts.items()
    }
    given = list(given_facts())
    assert given
    assert {code for code, _ in given} == set(texts)
    assert [(code, facts) for code, facts in given if facts != wanted[code]] == []
