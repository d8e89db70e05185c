"""The Chinese sentences are complete, have the values of the English ones, and are compiled."""

import gettext
import io
import re

from pages.translations import MO, compiled, stored, templates

_PLACE = re.compile(r"\{(\w+)(?::[^{}]*)?\}")


def test_the_sentences_are_those_of_the_source():
    ours, known = ({message.id for message in catalog if message.id} for catalog in (templates(), stored()))

    assert ours - known == set(), "run: make pages, and translate the new sentences in the .po file"
    assert known - ours == set(), "no longer in the source; run: make pages"


def test_every_sentence_has_its_chinese_with_the_same_values():
    wrong = []
    for message in filter(lambda message: message.id, stored()):
        one, many = message.id if isinstance(message.id, tuple) else (message.id, message.id)
        own = message.string[0] if isinstance(message.id, tuple) else message.string
        is_equal = set(_PLACE.findall(own)) == {*_PLACE.findall(one), *_PLACE.findall(many)}
        if not own or not is_equal or re.search(r"\{\w+:", own):
            wrong.append((message.id, own))

    assert wrong == []


def test_the_compiled_sentences_are_those_of_the_po_file():
    committed, anew = (gettext.GNUTranslations(io.BytesIO(part)) for part in (MO.read_bytes(), compiled(stored())))
    ids = [message.id if isinstance(message.id, str) else message.id[0] for message in stored() if message.id]

    assert [one for one in ids if committed.gettext(one) != anew.gettext(one)] == [], "run: make pages"


def test_a_new_sentence_is_found_and_missed(tmp_path):
    (tmp_path / "new.py").write_text(
        'Said("all {n:,} of these are new", n=n)\ncounted(n, "{n} ox", "{n} oxen")\n'
        'T: Templates = {"a": "of a table"}\nnumbers("heading")\n'
        'Use("key", "name", of_trace="field", advice="do it")\nplain("not one")\n'
    )

    found = {message.id for message in templates(tmp_path) if message.id}
    assert found == {"all {n:,} of these are new", ("{n} ox", "{n} oxen"), "of a table", "heading", "name", "do it"}
    assert not found & {message.id for message in stored()}
