"""The model of a training: which of its parameters are trained, and how often a backward pass reached some of them."""

import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

_MOST_PARAMETERS = 4096
_LISTENED_PARAMETERS = 4
"""Number of parameters with a gradient hook. The first, the last and two in between show which parts are trained."""
_MOST_BACKWARDS = 1 << 12


class TrainedModel:
    """The model, which is not kept alive.

    Attributes:
        model: Returns the model; None if it is gone.
        backwards: How many gradients each of the four parameters got, as digits of a number in base `_MOST_BACKWARDS`.
        state: A hash of which parameters were trained when `has_changed` was called.
    """

    def __init__(self, model: nn.Module, on_gradient: Callable[[], None] = lambda: None) -> None:
        self.model = weakref.ref(model)
        self.backwards = self.state = 0
        self._on_gradient = on_gradient
        self._parameters = [weakref.ref(p) for p in islice(nn.Module.parameters(model), _MOST_PARAMETERS)]
        self._flags: list[bool] | None = None
        self._handles: list[RemovableHandle] = []
        self._structure: int | None = None
        self.has_changed()

    def has_changed(self) -> bool:
        """Whether other parameters are trained than at the last call."""
        flags = [(p := ref()) is not None and p.requires_grad for ref in self._parameters]
        if flags == self._flags:
            return False
        self._flags, self.state = flags, hash(tuple(flags))
        self._listen()
        return True

    def has_other_parameters(self) -> bool:
        """Whether the model has other parameters than at the last call; False if it is gone."""
        model, before = self.model(), self._structure
        if model is None:
            return False
        parameters = (p for p in nn.Module.parameters(model) if not is_lazy(p))
        self._structure = hash(tuple((p.shape, p.dtype, p.requires_grad) for p in parameters))
        return before is not None and before != self._structure

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _listen(self) -> None:
        self.stop()
        found = [p for ref in self._parameters if (p := ref()) is not None]
        trained = [p for p in found if p.requires_grad and p.is_leaf and type(p) is nn.Parameter]
        last = len(trained) - 1
        chosen = dict.fromkeys(last * part // (_LISTENED_PARAMETERS - 1) for part in range(_LISTENED_PARAMETERS))
        for part, index in enumerate(chosen if trained else ()):
            hook = partial(_count_backward, weakref.ref(self), _MOST_BACKWARDS**part)
            self._handles.append(trained[index].register_post_accumulate_grad_hook(hook))


def _count_backward(owner: "weakref.ref[TrainedModel]", of_part: int, _: Tensor) -> None:
    found = owner()
    if found is not None:
        found.backwards += of_part
        found._on_gradient()
