"""Lightning's names for what matmuls run in."""


def autocast_dtype(precision: object) -> str | None:
    """The type a mixed precision computes in; None where the weights tell.

    >>> autocast_dtype("bf16-mixed"), autocast_dtype("16-mixed"), autocast_dtype("bf16-true")
    ('bf16', 'fp16', None)
    """
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(precision))
