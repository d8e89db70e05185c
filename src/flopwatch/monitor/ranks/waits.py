"""Where the device of a rank waits for other ranks in a forward or backward pass, as far as that is known.

Ranks of DistributedDataParallel (DDP) wait for each other at two places of a pass only. Before the forward pass, DDP
broadcasts the buffers of the module inside, and the stream waits for the broadcast. After the last node of the backward
pass, the stream waits for the all-reduces, which ran in another stream until then. The rest of the passes is the work
of this rank alone. In FSDP, tensor, context and pipeline parallelism and SyncBatchNorm, every layer may wait.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

NOT_REPLICATED = "no forward pass of a DistributedDataParallel module was seen in a step"
_SHARDED = "the model is sharded (FSDP, tensor parallel), so its layers wait for those of other ranks"
_SYNC_BATCH_NORM = "SyncBatchNorm waits for other ranks inside of the passes"
_WRAPPED = "another module calls the DistributedDataParallel module, so it is not seen when its forward pass begins"
_COMPILED = (
    "DistributedDataParallel broadcasts the buffers of compiled code, and when that ends is not seen; it does not "
    "broadcast them with forward_sync_buffers=False (broadcast_buffers=False in earlier releases of torch)"
)


class PassWaits(NamedTuple):
    """How the passes of a module wait for other ranks.

    Attributes:
        is_replicated: Whether it is DDP; otherwise its passes do not wait.
        ends_with: The module whose call shows that the wait before the forward pass is over; None without such a wait.
    """

    is_replicated: bool = False
    ends_with: nn.Module | None = None


class KnownWaits:
    """What is known of the waits of each module that was called, outside of other modules.

    Attributes:
        ranks_per_batch: How many ranks share a batch, and so exchange parts of it inside of the passes.
        why_unknown: Why it is not known how long passes wait; None if it is.
    """

    ranks_per_batch = 1

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._found: WeakKeyDictionary[nn.Module, PassWaits | str] = WeakKeyDictionary()
        self.why_unknown: str | None = NOT_REPLICATED

    def of(self, module: nn.Module | None, *, is_region: bool = False) -> PassWaits | None:
        """How the passes of this module wait; None if that is not known. `is_region`: compiled code runs it."""
        if module is None:
            return None
        found = self._found.get(module)
        if found is None:
            found = self._found[module] = _waits_of(module, self._world_size)
        if self.ranks_per_batch > 1:
            found = f"{self.ranks_per_batch} ranks share a batch, so they wait for each other inside of the passes"
        if is_region and isinstance(found, PassWaits) and found.ends_with is not None:
            found = _COMPILED
        if isinstance(found, str):
            self.why_unknown = found
            return None
        if found.is_replicated and self.why_unknown == NOT_REPLICATED:
            self.why_unknown = None
        return found


def _waits_of(module: nn.Module, world_size: int) -> PassWaits | str:
    parts = list(module.modules())
    if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in parts):
        return _SHARDED
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return _SHARDED
    if any(isinstance(part, nn.SyncBatchNorm) for part in parts):
        return _SYNC_BATCH_NORM
    if not isinstance(module, DistributedDataParallel):
        return _WRAPPED if any(isinstance(part, DistributedDataParallel) for part in parts) else PassWaits()
    ranks = module.process_group.size()
    if ranks != world_size:
        return f"the model is replicated over {ranks} of {world_size} ranks, and the others work on other parts of it"
    # Releases before torch 2.13 have only the second name, which is deprecated since then.
    name = "forward_sync_buffers" if hasattr(module, "forward_sync_buffers") else "broadcast_buffers"
    has_broadcast = getattr(module, name) and next(module.module.buffers(), None) is not None
    return PassWaits(is_replicated=True, ends_with=module.module if has_broadcast else None)
