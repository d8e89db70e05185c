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

from flopwatch.torch_internals.autograd import at_end_of_backward as at_end_of_backward
from flopwatch.torch_internals.autograd import compiled_graphs as compiled_graphs
from flopwatch.torch_internals.autograd import compiled_original as compiled_original
from flopwatch.torch_internals.autograd import current_autograd_node as current_autograd_node
from flopwatch.torch_internals.autograd import current_graph_task_id as current_graph_task_id
from flopwatch.torch_internals.autograd import engine_code as engine_code
from flopwatch.torch_internals.autograd import graph_kernel as graph_kernel
from flopwatch.torch_internals.autograd import is_checkpoint_recomputing as is_checkpoint_recomputing
from flopwatch.torch_internals.autograd import is_compiled_function as is_compiled_function
from flopwatch.torch_internals.autograd import knows_nodes as knows_nodes
from flopwatch.torch_internals.autograd import recorded_operations as recorded_operations
from flopwatch.torch_internals.autograd import requested_compilations as requested_compilations
from flopwatch.torch_internals.autograd import runs_compiled_backward as runs_compiled_backward
from flopwatch.torch_internals.autograd import runs_forward_again as runs_forward_again
from flopwatch.torch_internals.autograd import runs_forward_code as runs_forward_code
from flopwatch.torch_internals.autograd import saves_through_hooks as saves_through_hooks
from flopwatch.torch_internals.autograd import sees_compiled_backward as sees_compiled_backward
from flopwatch.torch_internals.autograd import sees_graph_tasks as sees_graph_tasks
from flopwatch.torch_internals.autograd import sequence_nr as sequence_nr
from flopwatch.torch_internals.autograd import wrap_backend_calls as wrap_backend_calls
from flopwatch.torch_internals.modules import ANY_BATCH_NORM as ANY_BATCH_NORM
from flopwatch.torch_internals.modules import ANY_DROPOUT as ANY_DROPOUT
from flopwatch.torch_internals.modules import LocalBatchNorm as LocalBatchNorm
from flopwatch.torch_internals.modules import arguments_by_name as arguments_by_name
from flopwatch.torch_internals.modules import call_slot as call_slot
from flopwatch.torch_internals.modules import class_before_sharding as class_before_sharding
from flopwatch.torch_internals.modules import compiled_call as compiled_call
from flopwatch.torch_internals.modules import default_store as default_store
from flopwatch.torch_internals.modules import fsdp_groups as fsdp_groups
from flopwatch.torch_internals.modules import global_hook_tables as global_hook_tables
from flopwatch.torch_internals.modules import is_in_transform as is_in_transform
from flopwatch.torch_internals.modules import module_tables as module_tables
from flopwatch.torch_internals.modules import own_buffers as own_buffers
from flopwatch.torch_internals.modules import own_modules as own_modules
from flopwatch.torch_internals.modules import own_parameters as own_parameters
from flopwatch.torch_internals.modules import whole_shape as whole_shape
from flopwatch.torch_internals.ops import CTC_LOSS as CTC_LOSS
from flopwatch.torch_internals.ops import CTC_LOSS_BACKWARD as CTC_LOSS_BACKWARD
from flopwatch.torch_internals.ops import FAKE_TENSOR_LOGGER as FAKE_TENSOR_LOGGER
from flopwatch.torch_internals.ops import FUSED_SDP_CHOICE as FUSED_SDP_CHOICE
from flopwatch.torch_internals.ops import GROUPED_MM as GROUPED_MM
from flopwatch.torch_internals.ops import PIN_MEMORY as PIN_MEMORY
from flopwatch.torch_internals.ops import TO_COPY as TO_COPY
from flopwatch.torch_internals.ops import UNSAFE_VIEW as UNSAFE_VIEW
from flopwatch.torch_internals.ops import FakeTensor as FakeTensor
from flopwatch.torch_internals.ops import FakeTensorMode as FakeTensorMode
from flopwatch.torch_internals.ops import OpOverload as OpOverload
from flopwatch.torch_internals.ops import OpOverloadPacket as OpOverloadPacket
from flopwatch.torch_internals.ops import TorchDispatchMode as TorchDispatchMode
from flopwatch.torch_internals.ops import can_decompose as can_decompose
from flopwatch.torch_internals.ops import check_schemas as check_schemas
from flopwatch.torch_internals.ops import coo_values as coo_values
from flopwatch.torch_internals.ops import dispatch_mode_stack as dispatch_mode_stack
from flopwatch.torch_internals.ops import has_kernel as has_kernel
from flopwatch.torch_internals.ops import is_flex_attention as is_flex_attention
from flopwatch.torch_internals.ops import is_flex_device_check as is_flex_device_check
from flopwatch.torch_internals.ops import is_identity_score as is_identity_score
from flopwatch.torch_internals.ops import kernels_on_fakes as kernels_on_fakes
from flopwatch.torch_internals.ops import modes_off as modes_off
from flopwatch.torch_internals.ops import needs_values as needs_values
from flopwatch.torch_internals.ops import op_name as op_name
from flopwatch.torch_internals.ops import op_packet as op_packet
from flopwatch.torch_internals.ops import op_schema as op_schema
from flopwatch.torch_internals.ops import packet_name as packet_name
from flopwatch.torch_internals.ops import python_body as python_body
from flopwatch.torch_internals.ops import receive_higher_order_ops as receive_higher_order_ops
from flopwatch.torch_internals.ops import runs_kernels_on_fakes as runs_kernels_on_fakes
from flopwatch.torch_internals.ops import sees_dispatch_modes as sees_dispatch_modes
from flopwatch.torch_internals.ops import short_op_name as short_op_name
from flopwatch.torch_internals.ops import stored_count as stored_count
from flopwatch.torch_internals.ops import tensor_version as tensor_version
from flopwatch.torch_internals.probes import PRIVATE_NAMES as PRIVATE_NAMES
from flopwatch.torch_internals.probes import apart as apart
from flopwatch.torch_internals.probes import checked as checked
from flopwatch.torch_internals.probes import forget_probes as forget_probes
from flopwatch.torch_internals.probes import what_is_missing as what_is_missing
