"""A sweep in which every text tries to become something else than text."""

from dataclasses import replace

from support.few_results import ended
from testbeds.made_up_sweep import example_specs, make_result

OWNED = "<script>document.title='owned'</script>"
IMAGE = '"><img src=x onerror="document.title=\'owned\'">'
ENDINGS = "]]> --> </script></style></title><!-- {{x}} ${x} `x` | **b** [l](http://evil.example/x) @somebody"
MARKS = (
    "emoji 🦙, right-to-left \u202eevil\u202c \u2066x\u2069, half \ud83d, null \x00, "
    "escape \x1b[31mred\x1b[0m \x1b]0;owned\x07"
)
HOSTILE = f"{OWNED} {IMAGE} {ENDINGS} {MARKS}"


def hostile_results():
    """Failures and successes with hostile names, labels, models, options, reasons, logs and environments."""
    exception = {"type": f"Error{OWNED}", "message": HOSTILE}
    failed = [
        ended(
            "module:Class", batch, 64, outcome, name=f"{outcome} {HOSTILE}", label=f"{OWNED}{IMAGE}", model=HOSTILE,
            options={HOSTILE: HOSTILE}, reason=HOSTILE, log_tail=f"{HOSTILE}\n```\n{HOSTILE}", stacks=HOSTILE,
            command=HOSTILE, phase=OWNED, evidence={"exception": exception, OWNED: HOSTILE},
            environment={"torch": OWNED, "device": {"name": IMAGE}, "host": HOSTILE},
        )
        for batch, outcome in enumerate(("error", "hang", "crash", "oom_device", "unsupported"), start=1)
    ]  # fmt: skip
    spec = replace(example_specs()[0], label=f"{OWNED}{IMAGE}", model="small", device=HOSTILE)
    good = make_result(spec, with_accidents=False)
    ran = [replace(good, name=f"ok {HOSTILE}", environment={"torch": HOSTILE}), _larger(good, spec)]
    return [*failed, *ran]


def _larger(good, spec):
    return replace(good, name=f"larger {HOSTILE}", spec=replace(spec, batch_size=16, trainer="ghost"))
