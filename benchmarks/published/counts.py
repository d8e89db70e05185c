"""Counts a model on fake tensors: its FLOPs per token by each kind of attention, and those of some of its parts."""

import json
import os
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from flopwatch.flops import FlopLaw, count_flops, fit_flops_law
from flopwatch.flops.conventions import CONVENTIONS, by_count, parameters_in_no_product, routers
from flopwatch.records.flops import AttentionConvention, FlopCount
from published.models import MODELS
from published.rows import DATA

STORED = DATA / "counts.json"


@dataclass(frozen=True, slots=True)
class Counted:
    """FLOPs per token of a forward and backward pass.

    Attributes:
        flops: All that were counted.
        by_convention: By each convention with this kind of attention.
        head: Of the output head, whose weight has a row for each word.
        experts: Of the experts that a token is sent to, without those that every token uses.
        states: Of the state-space layers, projections included.
    """

    parameters: int
    flops: float
    by_convention: dict[str, float]
    head: float
    experts: float
    states: float
    routers: float
    notes: tuple[str, ...] = ()


class Counts:
    """Counts each model at each length once; what was counted before is read from a file unless `afresh`."""

    def __init__(self, *, afresh: bool) -> None:
        self._stored: dict[str, Any] = {} if afresh or not STORED.exists() else json.loads(STORED.read_text("utf-8"))
        self.met: dict[str, Counted] = {}
        self._laws: dict[str, FlopLaw] = {}

    def of(self, model: str, length: int, attention: AttentionConvention) -> Counted:
        key = f"{model} @ {length}, {attention}"
        if key not in self.met:
            stored = self._stored.get(key)
            if stored is not None:
                self.met[key] = Counted(**{**stored, "notes": tuple(stored["notes"])})
            elif MODELS[model].learned_positions:
                self.met[key] = by_law(self._law(model), model, length)
            else:
                self.met[key] = counted(model, length, attention)
        return self.met[key]

    def _law(self, model: str) -> FlopLaw:
        """The FLOPs of a model at every length, from few counts: published at up to eight lengths each."""
        if model not in self._laws:
            self._laws[model] = law_of(model)
        return self._laws[model]

    def write(self) -> None:
        content = {key: asdict(each) for key, each in sorted(self.met.items())}
        STORED.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def built(model: str, length: int) -> nn.Module:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    known = MODELS[model]
    positions = {"n_positions": length} if known.learned_positions else {"max_position_embeddings": length}
    config = getattr(transformers, known.config)(**positions, **known.settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-any-return]


LONGEST = 65_536


def law_of(model: str) -> FlopLaw:
    network = built(model, LONGEST)
    ids = torch.zeros(1, LONGEST, dtype=torch.long)
    law = fit_flops_law(network, {"input_ids": ids, "labels": ids}, attention="full")
    if not law.exact:
        raise RuntimeError(f"{model} has no exact law: {law.notes}")
    return law


def by_law(law: FlopLaw, model: str, length: int) -> Counted:
    """A dense model whose FLOPs at this length come from its law. The table of positions is as long as the row's."""
    network = built(model, length)
    flops = law.model_flops(1, length) / length
    conventions = [each for each in CONVENTIONS.values() if each.attention == "full"]
    return Counted(
        parameters=sum(each.numel() for each in network.parameters()),
        flops=flops,
        by_convention={each.name: flops + 6 * parameters_in_no_product(each, network) for each in conventions},
        head=0.0,
        experts=0.0,
        states=0.0,
        routers=0.0,
    )


def counted(model: str, length: int, attention: AttentionConvention) -> Counted:
    network = built(model, length)
    ids = torch.zeros(1, length, dtype=torch.long)
    count = count_flops(network, {"input_ids": ids, "labels": ids}, method="trace", attention=attention)
    if count.uncounted or count.attention != attention:
        raise RuntimeError(f"{model} was not counted as {attention}: {count.notes}, {count.uncounted}")
    conventions = [each for each in CONVENTIONS.values() if each.attention == attention]
    return Counted(
        parameters=sum(each.numel() for each in network.parameters()),
        flops=count.model_flops / length,
        by_convention={each.name: by_count(each, network, count, (1, length)) / length for each in conventions},
        head=_part(count, r"lm_head") / length,
        experts=_part(count, r"\.experts") / length,
        states=_states(network, count) / length,
        routers=sum(_needed(count, path) for path in routers(network, count)) / length,
        notes=count.notes,
    )


def _part(count: FlopCount, pattern: str) -> int:
    return sum(_needed(count, path) for path in count.by_module if re.search(pattern, path))


def _needed(count: FlopCount, path: str) -> int:
    return count.by_module[path].forward + count.by_module[path].backward


def _states(network: nn.Module, count: FlopCount) -> int:
    mixers = [path for path, module in network.named_modules() if "Mamba" in type(module).__name__]
    paths = [path for path in count.by_module if any(path == each or path.startswith(f"{each}.") for each in mixers)]
    return sum(_needed(count, path) for path in paths)
