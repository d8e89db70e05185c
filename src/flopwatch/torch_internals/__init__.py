"""Every private name of torch that flopwatch uses; docs/design.md says what each is for, and what happens without it.

A name is private if it, or the module that it is taken from, begins with an underscore. `PRIVATE_NAMES` lists them;
`tests/test_private_names.py` checks that no other module uses one, and `tests/test_without_private_names.py` removes
each in turn. No behaviour depends on torch's version: before the first count, one check finds out what the names do
that counting needs. If it fails, FLOPs are estimated, and the estimate says why. What the others give is then unknown.

Not private in this sense are `TorchDispatchMode`, `FakeTensorMode`, `FakeTensor` and `Tensor._values`, which torch
documents although their paths have an underscore ("Extending PyTorch", "Fake tensor", "torch.sparse"), and names of
registered ops (`aten::_grouped_mm`): an op that a release does not register never matches.
"""
