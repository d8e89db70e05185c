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
    trl: str = ">=0.24"
    is_lowest: bool = False
    """The lowest version of everything that pyproject.toml asks for, with all extras; of these, only `transformers`
    limits it, because datasets, which TRL brings, would choose transformers 5."""

    @property
    def name(self) -> str:
        return f"torch{self.torch}-py{self.python}" + "-lowest" * self.is_lowest

    def requirements(self) -> list[str]:
        """The user's packages, which are installed before flopwatch."""
        frameworks = {name: getattr(self, name) for name in ("transformers", "numpy", "lightning", "accelerate", "trl")}
        return [f"torch=={self.torch}", *(name + pin for name, pin in frameworks.items())]


TOOLS = ("pytest>=8.4", "pytest-timeout>=2.3")

ROWS = (
    Row("2.6.0", "3.10", transformers="<5", is_lowest=True),
    Row("2.6.0", "3.10", transformers="==4.57.6", numpy="<2", lightning="==2.4.0", accelerate="==1.4.0"),
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
_BY_AGE = {"lowest": ROWS[0], "oldest": ROWS[1], "newest": ROWS[8]}
"""CI runs `oldest` and `newest` every time."""


def chosen(names: list[str]) -> list[Row]:
    """The rows of these names: `lowest`, `oldest`, `newest`, a torch such as `2.6`, or `2.15-py3.13`; all if empty."""
    if not names:
        return list(ROWS)
    rows = [row for name in names for row in _matching(name)]
    return list(dict.fromkeys(rows))


def _matching(name: str) -> list[Row]:
    if name in _BY_AGE:
        return [_BY_AGE[name]]
    torch, _, rest = name.removeprefix("torch").partition("-py")
    ends = {row: row.name.partition("-py")[2] for row in ROWS}
    rows = [row for row, end in ends.items() if f"{row.torch}.".startswith(f"{torch}.") and rest in ("", end)]
    if not rows:
        raise SystemExit(f"There is no row {name!r}. The rows are: {', '.join(row.name for row in ROWS)}.")
    return rows
