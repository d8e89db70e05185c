"""Texts that try to be something else than text, from a seed: what trials, schedulers and users may say."""

import random
from collections.abc import Iterator

LARGE = 50_000_000

_MARKUP = (
    "[/data/shards]",
    "[bold",
    "[/]",
    "[[x]]",
    "[link=file:///etc/passwd]x[/link]",
    "\\[/x]",
    "[red]a[/blue]",
    "[/x]",
)
_ANSI = (
    "\x1b[31m",
    "\x1b[2J\x1b[H",
    "\x1b]0;owned\x07",
    "\x1b]8;;http://x\x1b\\",
    "\x9b31m",
    "\x1bP+q\x1b\\",
    "\x1b",
    "\x1b[?1049h",
)
_CONTROL = ("\x00", "\x07", "\x08" * 9, "\r", "\r\n", "\x0b\x0c", "\x7f", "\x85", "\u2028", "\t", "\x1a", "\x04")
_UNICODE = (
    "🦙🔥",
    "👩‍👩‍👧",
    "\u202eevil\u202c",
    "\u2066x\u2069",
    "\u200b\ufeff",
    "Z̷̢͖a̴͕l̵g̶o̸" * 3,
    "ﷺ" * 9,
    "𝕏",
    "漢字",
    "\U000e0041",
    "é\u0301",
)
_SURROGATES = ("\ud800", "\udfff\ud800", "half \ud83d", "\udcff\udc80")
_HTML = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror=alert(1)>',
    "]]>--></script></style>",
    "&lt;&#0;",
    "<!--",
    "</pre><h1>",
)
_MARKDOWN = (
    "```",
    "`````\n# x\n`````",
    "| a | b |\n| - | - |",
    "[l](http://evil.example)",
    "![i](x)",
    "@somebody #12",
    "<details>",
    "\n---\n",
    "~~~",
    "$$x$$",
)
_FORMAT = ("%s%n%d", "{}", "{0.__class__}", "{x!r:>{y}}", "%(name)s", "${HOME}", "$(id)", "`id`", "{batch_size}")
_DATA = (
    '{"outcome": "ok"}',
    "null",
    "=cmd|' /C calc'!A0",
    "../../../etc/passwd",
    "NaN",
    "-1e999",
    "CUDA out of memory",
    "MemoryError",
)
_KINDS = (_MARKUP, _ANSI, _CONTROL, _UNICODE, _SURROGATES, _HTML, _MARKDOWN, _FORMAT, _DATA)


def hostile_texts(count: int, seed: int = 0) -> Iterator[str]:
    """Each piece once, then mixtures; every hundredth is long."""
    pieces = [piece for kind in _KINDS for piece in kind]
    chance = random.Random(seed)
    for number in range(count):
        if number < len(pieces):
            yield f"begin {pieces[number]} end"
        elif number % 100 == 99:
            yield chance.choice(pieces) * 20_000
        else:
            yield "".join(_mixed(chance) for _ in range(chance.randint(1, 12)))


def _mixed(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return "".join(chr(chance.choice((chance.randrange(0x100), chance.randrange(0x110000)))) for _ in range(9))
    return chance.choice(chance.choice(_KINDS)) + chance.choice(("", " ", "\n", "x"))
