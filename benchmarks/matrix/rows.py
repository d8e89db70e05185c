"""The rows of the matrix: which releases are installed together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One environment. Frameworks have a specifier such as `==4.57.6` or `<2`, empty for the newest that fits."""

    torch: str
    python: str
    transformers: str = "==5.22.2"
    numpy: str = ""
    lightning: str = ""
    accelerate: str = ""

    @property
    def name(self) -> str:
        return f"torch{self.torch}-py{self.python}"

    def requirements(self) -> list[str]:
        """What is installed before flopwatch: the user's packages, and pytest for the suite."""
        frameworks = {name: getattr(self, name) for name in ("transformers", "numpy", "lightning", "accelerate")}
        return [f"torch=={self.torch}", *(name + pin for name, pin in frameworks.items()), *_TOOLS]


_TOOLS = ("pytest>=8.4", "pytest-timeout>=2.3")

ROWS = (
    Row("2.6.0", "3.10", transformers="==4.57.6", numpy="<2", lightning="==2.4.0", accelerate="==1.3.0"),
    Row("2.8.0", "3.11", transformers="==4.57.6"),
    Row("2.9.1", "3.12"),
    Row("2.10.0", "3.11"),
    Row("2.12.1", "3.13"),
    Row("2.13.0", "3.11"),
    Row("2.14.1", "3.12"),
    Row("2.15.0", "3.11"),
    Row("2.15.0", "3.13"),
    Row("2.15.0", "3.14"),
)
OLDEST, NEWEST = ROWS[0], ROWS[7]
"""The two rows that CI runs every time."""


def chosen(names: list[str]) -> list[Row]:
    """The rows of these names: `oldest`, `newest`, a torch release such as `2.6`, or `2.15-py3.13`; all if empty."""
    if not names:
        return list(ROWS)
    rows = [row for name in names for row in _matching(name)]
    return list(dict.fromkeys(rows))


def _matching(name: str) -> list[Row]:
    if name in ("oldest", "newest"):
        return [OLDEST if name == "oldest" else NEWEST]
    torch, _, python = name.removeprefix("torch").partition("-py")
    rows = [row for row in ROWS if f"{row.torch}.".startswith(f"{torch}.") and python in ("", row.python)]
    if not rows:
        raise SystemExit(f"There is no row {name!r}. The rows are: {', '.join(row.name for row in ROWS)}.")
    return rows
