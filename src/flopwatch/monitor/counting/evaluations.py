"""Tells evaluations between two steps from calls that belong to the next step (pure).

Calls without gradients of modules in evaluation mode that come only now and then are an evaluation. Those that come
with every step, such as a teacher's, are part of it.
"""

from collections.abc import Sequence

from flopwatch.monitor.counting.call_kinds import CallKind


class Evaluations:
    """Remembers which modules are called before steps, and how often.

    Attributes:
        steps: Steps so far. A step with no call before it can be noted by adding 1.
        before: The calls before the step that the loop has opened, as `left_out` takes them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.before: list[tuple[CallKind, int]] = []
        self._first: dict[int, int] = {}
        self._met: dict[int, int] = {}
        self._trained: set[int] = set()

    def has(self, kind: CallKind, before: Sequence[CallKind]) -> bool:
        """Whether a call is part of an evaluation; `before` are the calls since the last step."""
        if kind.has_grad or any(call.has_grad for call in before):
            return False
        if kind.is_training:  # a loss module stays in training mode, even in an evaluation
            return not kind.has_parameters and any(self._is_irregular(call) for call in before)
        return self._is_irregular(kind)

    def _is_irregular(self, call: CallKind) -> bool:
        return not call.is_training and not self._is_regular(call.module)

    def left_out(self, noted: Sequence[tuple[CallKind, int]]) -> tuple[list[CallKind], int, bool]:
        """Return the calls without evaluations, the operations of the calls left out, and whether any were left out.

        Args:
            noted: The calls since the last step, each with the number of operations that autograd has recorded in it.
        """
        calls = [call for call, _ in noted]
        trained_in_mode = {call.module for call in calls if call.has_grad and call.is_training}
        # If the step also calls a module in training mode, earlier calls of it are an evaluation, even with gradients.
        is_begin = [call.has_grad and (call.is_training or call.module not in trained_in_mode) for call in calls]
        first = is_begin.index(True) if True in is_begin else len(calls)
        before = {call.module for call in calls[:first] if not call.is_training}
        self._note_step(before, {call.module for call in calls[first:] if call.has_grad})
        irregular = {module for module in before if not self._is_regular(module)}
        if irregular:  # a loss module stays in training mode, even in an evaluation
            irregular |= {call.module for call in calls[:first] if not call.has_parameters}
        is_kept = [index >= first or call.module not in irregular for index, call in enumerate(calls)]
        nodes = sum(nodes for (_, nodes), keeps in zip(noted, is_kept, strict=True) if not keeps)
        return [call for call, keeps in zip(calls, is_kept, strict=True) if keeps], nodes, bool(irregular)

    def note_opened(self, calls: Sequence[CallKind]) -> None:
        """Note a step that the loop has opened, with its calls."""
        evaluated = {call.module for call, _ in self.before if not call.has_grad and not call.is_training}
        self._note_step(evaluated, {call.module for call in calls if call.has_grad})

    def _note_step(self, before: set[int], trained: set[int]) -> None:
        self.steps += 1
        self._trained |= trained
        for module in before:
            self._first.setdefault(module, self.steps)
            self._met[module] = self._met.get(module, 0) + 1

    def _is_regular(self, module: int) -> bool:
        first = self._first.get(module)
        if first is None:  # at the first step only, a module that is not trained is taken for a teacher
            return not self.steps and module not in self._trained
        steps = self.steps - first + 1
        if first == 1 and steps == 1:
            return module not in self._trained
        return steps > 1 and 2 * (self._met[module] - 1) >= steps - 1
