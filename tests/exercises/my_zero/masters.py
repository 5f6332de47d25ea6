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

    def __init__(self, params, optimizer_class, master_dtype=None, **defaults):
        self.params = list(params)
        self.owners = assign_owners([param.numel() for param in self.params], dist.get_world_size())
        self.owner_of = dict(zip(self.params, self.owners))
        self.mine = [i for i, owner in enumerate(self.owners) if owner == dist.get_rank()]
        self.buckets = {}  # by owner; a rank that owns nothing has none
        for owner in sorted(set(self.owners)):
            of_owner = [param for param, its in zip(self.params, self.owners) if its == owner]
            self.buckets[owner] = flatten(of_owner)
        # What the local optimizer steps: copies in the masters' dtype. In the parameters' own dtype `.to`
        # copies nothing, and they are the same memory as the parameters with a .grad of their own.
        self.shards = {}
        for param in (self.params[i] for i in self.mine):
            self.shards[param] = torch.nn.Parameter(param.detach().to(master_dtype or param.dtype))
        # A rank may own nothing: torch refuses an empty list of parameters, not an empty group.
        self.local = optimizer_class([{"params": list(self.shards.values())}], **defaults)
        self.reducing = []  # what `update_in_backward` has started: gradients by parameter, and the calls
        self.sending = []
        self.is_updated = False

    @torch.no_grad()
    def step(self):
        """Update what this rank owns and send it, unless that was done in backward."""
        if not self.is_updated:
            self.update({param: param.grad for param in self.params})
            for owner, bucket in self.buckets.items():
                dist.broadcast(bucket, group_src=owner)
        self.is_updated = False
        for param, owner in self.owner_of.items():
            if owner != dist.get_rank():
                param.grad = None

    def update(self, gradients):
        """One step of the local optimizer with these gradients alone."""
        for param, shard in self.shards.items():
            gradient = gradients.get(param)
            shard.grad = None if gradient is None else gradient.to(shard.dtype)
        self.local.step()
        for param, shard in self.shards.items():
            if shard.grad is not None:  # backward may still need the others as they are
                param.copy_(shard)
        self.local.zero_grad()

    @property
    def param_groups(self):
        """The options of the local optimizer: a schedule changes them here."""
        return self.local.param_groups

    def zero_grad(self):
        """Forget all gradients, also those of parameters that others own."""
        for param in self.params:
            param.grad = None

    def reduce_to_owners(self, state, bucket):
        """A hook of DDP: average each gradient of a bucket on its owner, and nowhere else."""
        _, calls = self.start_reduction(bucket)
        for call in calls:
            call.wait()
        return done(bucket)

    def start_reduction(self, bucket):
        """Gradients by parameter that will be averaged, and the calls to wait for."""
        gradients, calls = dict(zip(bucket.parameters(), bucket.gradients())), []
        for param, gradient in gradients.items():
            gradient /= dist.get_world_size()
            calls.append(dist.reduce(gradient, group_dst=self.owner_of[param], async_op=True))
        return gradients, calls

    @torch.no_grad()
    def update_in_backward(self, state, bucket):
        """A hook of DDP: start to reduce this bucket, then update and send the one before it."""
        self.reducing.append(self.start_reduction(bucket))
        while len(self.reducing) > (0 if bucket.is_last() else 1):
            gradients, calls = self.reducing.pop(0)
            for call in calls:
                call.wait()
            self.update(gradients)
            for param in gradients:
                self.sending.append(dist.broadcast(param, group_src=self.owner_of[param], async_op=True))
        if bucket.is_last():
            for call in self.sending:
                call.wait()
            self.sending.clear()
            self.is_updated = True
        return done(bucket)

    def state_dict(self):
        """The state that the unsharded optimizer would have, on every rank."""
        packed = self.local.state_dict()
        mine = {self.mine[index]: dict(state) for index, state in packed["state"].items()}
        for number in mine:
            shard = self.shards[self.params[number]]
            if shard.dtype != self.params[number].dtype:
                mine[number]["master_weight"] = shard.detach()
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        state = {number: of_rank[number] for of_rank in of_ranks for number in of_rank}
        group = {**packed["param_groups"][0], "params": list(range(len(self.params)))}
        return {"state": dict(sorted(state.items())), "param_groups": [group]}

    def load_state_dict(self, state_dict):
        """Take this rank's part of what `state_dict` gave, at any number of ranks."""
        mine = {}
        for index, number in enumerate(self.mine):
            if number in state_dict["state"]:
                mine[index] = dict(state_dict["state"][number])
                if (master := mine[index].pop("master_weight", None)) is not None:
                    self.shards[self.params[number]].data.copy_(master)
        group = {**state_dict["param_groups"][0], "params": list(range(len(self.mine)))}
        self.local.load_state_dict({"state": mine, "param_groups": [group]})


def done(bucket):
    """What DDP waits for after a hook: here there is nothing left to wait for."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
