"""Every private name of torch that flopwatch uses, what it is for, how it is checked, and what happens without it.

A name is private if it, or the module that it is taken from, begins with an underscore. `PRIVATE_NAMES` lists them;
`tests/test_private_names.py` checks that no other module uses one, and `tests/test_without_private_names.py` removes
each in turn. No behaviour depends on torch's version: the first use of a name checks what it does (a probe). If the
check fails, a fallback is used, and `what_is_missing` says so. Without a name of custom ops or of `torch.compile`, the
count itself names the op that it lacks, or the compiled model is traced as it is.

Not private in this sense are `TorchDispatchMode`, `FakeTensorMode`, `FakeTensor` and `Tensor._values`, which torch
documents although their paths have an underscore ("Extending PyTorch", "Fake tensor", "torch.sparse"), and names of
registered ops (`aten::_grouped_mm`): an op that a release does not register never matches.
"""
