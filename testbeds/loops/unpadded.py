"""What a padded batch needs: the same training with every row called by itself, at its own length.

Only for models of transformers that the loops train. Nothing of flopwatch is used here.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import transformers
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

KINDS = (transformers.LlamaForCausalLM, transformers.T5ForConditionalGeneration)


@contextmanager
def row_by_row() -> Iterator[None]:
    """While this is open, these models take a padded batch apart."""
    with ExitStack() as stack:
        for kind in KINDS:
            stack.enter_context(mock.patch.object(kind, "forward", _taken_apart(kind.forward)))
        yield


def _taken_apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)  # a `Trainer` asks which arguments it has
    def forward_row_by_row(self: Any, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        if attention_mask is None or bool(attention_mask.all()):
            return forward(self, input_ids=input_ids, attention_mask=attention_mask, **more)
        with (
            _disable_current_modes(),
            torch.no_grad(),
        ):  # draws what the padded call draws, so the next batch is the same
            forward(self, input_ids=input_ids, attention_mask=attention_mask, **more)
        lengths = attention_mask.sum(1).tolist()
        with torch.random.fork_rng(), _positions_once(self, input_ids.shape[1]):
            found = [
                forward(self, input_ids=input_ids[row : row + 1, :length], **_of_row(self, more, row, length))
                for row, length in enumerate(lengths)
            ]
        longest = max(out.logits.shape[1] for out in found)
        logits = [functional.pad(out.logits, (0, 0, 0, longest - out.logits.shape[1])) for out in found]
        losses = [out.loss for out in found if out.loss is not None]
        loss = torch.stack(losses).mean() if losses else None
        return type(found[0])(loss=loss, logits=torch.cat(logits))

    return forward_row_by_row


def _of_row(model: Any, more: dict[str, Any], row: int, length: int) -> dict[str, Any]:
    """Tensors of the whole batch, cut to one row; targets of an encoder-decoder have a length of their own."""
    upto = int((more["labels"][row] != -100).sum()) if model.config.is_encoder_decoder else length
    return {
        name: value[row : row + 1, :upto] if isinstance(value, torch.Tensor) and value.dim() == 2 else value
        for name, value in more.items()
    }


@contextmanager
def _positions_once(model: Any, length: int) -> Iterator[None]:
    """A table of rotary positions is the same for all rows, so the step pays it once, for the longest."""
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if rotary is None:
        yield
        return
    whole = rotary(model.lm_head.weight, torch.arange(length)[None])

    def cut(_: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part[:, : position_ids.shape[1]] for part in whole)

    with mock.patch.object(rotary, "forward", cut):
        yield
