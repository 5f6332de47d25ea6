"""My own ZeRO."""

import torch
import torch.distributed as dist


def assign_owners(numels, world_size):
    """The owner of each parameter: the largest first, each to the rank that has the fewest elements."""
    owners = [0] * len(numels)
    loads = [0] * world_size
    for number in sorted(range(len(numels)), key=lambda number: -numels[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += numels[number]
    return owners


@torch.no_grad()
def flatten(params):
    """Move the parameters into one flat tensor, and return it."""
    flat = torch.cat([param.flatten() for param in params])
    offset = 0
    for param in params:
        param.data = flat[offset : offset + param.numel()].view(param.shape)
        offset += param.numel()
    return flat


class MyZero:
    """An optimizer whose state is sharded over the ranks."""

    def __init__(self, params, optimizer_class, **defaults):
        self.params = list(params)
        self.owners = assign_owners([param.numel() for param in self.params], dist.get_world_size())
        self.mine = [i for i, owner in enumerate(self.owners) if owner == dist.get_rank()]
        self.buckets = {}  # by owner; a rank that owns nothing has none
        for owner in sorted(set(self.owners)):
            of_owner = [param for param, its in zip(self.params, self.owners) if its == owner]
            self.buckets[owner] = flatten(of_owner)
        # A rank may own nothing: torch refuses an empty list of parameters, not an empty group.
        self.local = optimizer_class([{"params": [self.params[i] for i in self.mine]}], **defaults)

    @torch.no_grad()
    def step(self):
        """Update what this rank owns, then send each bucket from its owner to all ranks."""
        self.local.step()
        for owner, bucket in self.buckets.items():
            dist.broadcast(bucket, group_src=owner)

    @property
    def param_groups(self):
        """The options of the local optimizer: a schedule changes them here."""
        return self.local.param_groups

    def zero_grad(self):
        """Forget all gradients, also those of parameters that others own."""
        for param in self.params:
            param.grad = None
