"""A model over several GPUs with FSDP2: each process keeps a slice of every weight, gradient and Adam moment, in fp32.

    shard(model, offload=False)          # in place; afterwards model(...) gathers a block's weights, in bf16 on CUDA, when it runs
    with unsharded(model):               # all weights on every process: sampling needs no communication, so
        model.generate(...)              # processes may take different numbers of steps
    state = whole_state(model)           # on every process together; ordinary names, fp32, on the CPU of rank 0

Every forward and backward pass outside `unsharded` is one of all processes together. Leaves out: tensor, sequence and pipeline
parallelism; several groups of shards with replicas between them (hybrid sharding).
"""
import contextlib

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def is_sharded(model):
    return isinstance(model, FSDPModule)


def device_of(model):
    """Where a model computes; its weights may lie elsewhere (offloaded shards)."""
    if not is_sharded(model):
        return model.device
    return torch.device("cuda", torch.cuda.current_device()) if model.shards_compute_on == "cuda" else torch.device("cpu")


def shard(model, device_type, offload=False):
    """Shard a whole fp32 model, block by block, over all processes; offload keeps the slices in the host's memory.

    Gradients are summed over processes, not averaged, since our denominators are those of the whole step.
    """
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    settings = dict(mesh=init_device_mesh(device_type, (dist.get_world_size(),)),
                    mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
                    offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    for block in [m for m in model.modules() if type(m).__name__ in model._no_split_modules]:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    for part in parts(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.shards_compute_on = device_type
    return model


def parts(model):
    """The model and its blocks, each of which gathers its weights at once."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


@contextlib.contextmanager
def unsharded(model):
    """All weights stay gathered inside; nothing is to be trained there. Without sharding it does nothing."""
    for part in parts(model):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts(model):
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)  # the whole model's own weights are needed until the loss


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_state(model):
    """The state dict of a model, whole on rank 0 (empty on others when sharded)."""
    return get_model_state_dict(model, options=WHOLE)


def whole_optimizer_state(model, optimizer):
    """The state of an optimizer by the names of its parameters, whole on rank 0: for any number of processes, sharded or not."""
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def load_optimizer_state(model, optimizer, state):
    """Take up what whole_optimizer_state() gave; every process gives the same whole state."""
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
