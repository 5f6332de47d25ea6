"""The reader's own file: mistakes, each a change of a reference file, with what the check must say."""

from __future__ import annotations

from typing import NamedTuple


class Wrong(NamedTuple):
    """A mistake: in the file of `stage`, `old` becomes `new`; the check of `rung` then says `message`."""

    name: str
    stage: str
    rung: str
    old: str
    new: str
    message: str


SEND_PARAMETERS = """        for param, owner in zip(self.params, self.owners):
            dist.broadcast(param, group_src=owner)
"""
SEND_BUCKETS = """        for owner, bucket in self.buckets.items():
            dist.broadcast(bucket, group_src=owner)
"""
FINISH = "        while len(self.reducing) > (0 if bucket.is_last() else 1):"
GATHER = '        mine = {self.mine[index]: state for index, state in packed["state"].items()}\n'

WRONG = [
    # ------------------------------------------------------------------------------------------- owners
    Wrong(
        "smallest_first",
        "owners",
        "owners",
        "-numels[number]",
        "numels[number]",
        "it belongs to rank 0",
    ),
    Wrong(
        "unsorted",
        "owners",
        "owners",
        "sorted(range(len(numels)), key=lambda number: -numels[number])",
        "range(len(numels))",
        "registration order",
    ),
    Wrong("no_return", "owners", "owners", "    return owners\n", "", "returned None"),
    Wrong(
        "own_rank_first",
        "owners",
        "owners",
        "    loads = [0] * world_size\n",
        "    import torch.distributed as dist\n    loads = [0] * world_size\n"
        "    loads[dist.get_rank()] = 1\n",
        "not the same on all ranks",
    ),
    Wrong(
        "does_not_end",
        "owners",
        "owners",
        "    loads = [0] * world_size\n",
        "    while True:\n        pass\n",
        "did not return within",
    ),
    Wrong("syntax", "owners", "owners", "    return owners", "    return owners)", "SyntaxError"),
    # --------------------------------------------------------------------------------------------- step
    Wrong("sends_nothing", "step", "step", SEND_PARAMETERS, "", "did not arrive there"),
    Wrong("never_steps", "step", "step", "        self.local.step()\n", "", "Was self.local.step.. called"),
    Wrong(
        "sends_first",
        "step",
        "step",
        "        self.local.step()\n" + SEND_PARAMETERS,
        SEND_PARAMETERS + "        self.local.step()\n",
        "Step first, then send",
    ),
    Wrong("rank_0_sends", "step", "step", "group_src=owner", "group_src=0", "sent by its own owner"),
    Wrong(
        "only_owners_call",
        "step",
        "step",
        "            dist.broadcast(param, group_src=owner)",
        "            if owner == dist.get_rank():\n                dist.broadcast(param, group_src=owner)",
        "make different calls",
    ),
    Wrong(
        "forgets_to_wait",
        "step",
        "step",
        "group_src=owner)",
        "group_src=owner, async_op=True)",
        "nobody waited",
    ),
    Wrong(
        "keeps_all_state",
        "step",
        "step",
        "[self.params[i] for i in self.mine]",
        "self.params",
        "keeps state for 4 parameters, and it owns",
    ),
    Wrong(
        "empty_list",
        "step",
        "step",
        '[{"params": [self.params[i] for i in self.mine]}]',
        "[self.params[i] for i in self.mine]",
        "A rank may own nothing",
    ),
    Wrong(
        "generator",
        "step",
        "step",
        "self.params = list(params)\n",
        "self.params = params\n        params = list(params)\n",
        "generator|list index|not subscriptable",
    ),
    Wrong(
        "other_owners",
        "step",
        "step",
        "self.owners = assign_owners(",
        "self.owners = (lambda sizes, n: [i % n for i in range(len(sizes))])(",
        "updates|old even there|owns",
    ),
    Wrong("no_local", "step", "step", "self.local", "self.inner", "has no `local`"),
    Wrong(
        "averages",
        "step",
        "step",
        "            dist.broadcast(param, group_src=owner)",
        "            dist.all_reduce(param)\n            param /= dist.get_world_size()",
        "added to the others'",
    ),
    Wrong(
        "typo",
        "step",
        "step",
        "self.local.step()",
        "self.locale.step()",
        r"AttributeError.*wrong\.py, line 30: self\.locale",
    ),
    Wrong(
        "hangs",
        "step",
        "step",
        "        self.local.step()\n",
        "        while dist.get_rank() == 0:\n            pass\n        self.local.step()\n",
        "rank 0 stood in step, line 3",
    ),
    Wrong(
        "exits",
        "step",
        "step",
        "        self.local.step()\n",
        "        import os\n        os._exit(3)\n",
        "exit code 3",
    ),
    Wrong(
        "with_autograd",
        "step",
        "step",
        "        self.local.step()\n",
        "        self.local.step()\n        with torch.enable_grad():\n            self.params[0].mul_(1)\n",
        "Put @torch.no_grad",
    ),
    # ------------------------------------------------------------------------------------------ buckets
    Wrong(
        "one_call_each", "buckets", "buckets", SEND_BUCKETS, SEND_PARAMETERS, "8 broadcasts, and 2 ranks own"
    ),
    Wrong(
        "values_left_behind",
        "buckets",
        "buckets",
        "torch.cat([param.flatten() for param in params])",
        "torch.zeros(sum(param.numel() for param in params))",
        "changed the values",
    ),
    Wrong(
        "copies",
        "step",
        "buckets",
        SEND_PARAMETERS,
        """        for owner in sorted(set(self.owners)):
            of_owner = [param for param, its in zip(self.params, self.owners) if its == owner]
            flat = torch.cat([param.flatten() for param in of_owner])
            dist.broadcast(flat, group_src=owner)
            for param, values in zip(of_owner, flat.split([param.numel() for param in of_owner])):
                param.copy_(values.view(param.shape))
""",
        "copied together",
    ),
    Wrong(
        "sends_a_copy",
        "buckets",
        "buckets",
        "dist.broadcast(bucket,",
        "dist.broadcast(bucket.clone(),",
        "did not arrive there",
    ),
    Wrong(
        "all_to_all",
        "buckets",
        "buckets",
        "            dist.broadcast(bucket, group_src=owner)",
        "            if owner != dist.get_rank():\n"
        "                bucket.zero_()\n"
        "            dist.all_reduce(bucket)",
        "calls all_reduce",
    ),
    # ------------------------------------------------------------------------------------------ options
    Wrong(
        "a_copy",
        "options",
        "options",
        "return self.local.param_groups",
        "return [dict(group) for group in self.local.param_groups]",
        "give out its param_groups, not a copy",
    ),
    Wrong(
        "only_its_own",
        "options",
        "options",
        "        for param in self.params:\n            param.grad = None\n",
        "        self.local.zero_grad()\n",
        "still has the gradients",
    ),
    # ---------------------------------------------------------------------------------------- to owners
    Wrong(
        "a_sum", "to_owners", "to_owners", "            gradient /= dist.get_world_size()\n", "", "is the sum"
    ),
    Wrong(
        "everywhere",
        "to_owners",
        "to_owners",
        "dist.reduce(gradient, group_dst=self.owner_of[param])",
        "dist.all_reduce(gradient)",
        "they came by all_reduce",
    ),
    Wrong(
        "own_alone",
        "to_owners",
        "to_owners",
        "            dist.reduce(gradient, group_dst=self.owner_of[param])\n",
        "",
        "made of this rank's own alone",
    ),
    Wrong(
        "kept",
        "to_owners",
        "to_owners",
        "                param.grad = None\n        self.local",
        "                pass\n        self.local",
        "still holds gradients",
    ),
    Wrong(
        "to_rank_0", "to_owners", "to_owners", "group_dst=self.owner_of[param]", "group_dst=0", "on rank 1"
    ),
    Wrong("no_future", "to_owners", "to_owners", "        return reduced\n", "", "[Ff]uture"),
    Wrong(
        "breaks_in_the_hook",
        "to_owners",
        "to_owners",
        "self.owner_of[param])",
        "self.owner_of[gradient])",
        r"KeyError.*line 67",
    ),
    # -------------------------------------------------------------------------------------- in backward
    Wrong(
        "twice",
        "in_backward",
        "in_backward",
        "        if not self.is_updated:\n",
        "        if True:\n",
        "step.. made another",
    ),
    Wrong(
        "updated_for_ever",
        "in_backward",
        "in_backward",
        "                dist.broadcast(bucket, group_src=owner)\n        self.is_updated = False\n",
        "                dist.broadcast(bucket, group_src=owner)\n",
        "no hook has seen does not make their update",
    ),
    Wrong(
        "all_at_the_end",
        "in_backward",
        "in_backward",
        FINISH,
        "        while bucket.is_last() and self.reducing:",
        "first broadcast comes after the last bucket",
    ),
    Wrong(
        "stands_still",
        "in_backward",
        "in_backward",
        FINISH,
        "        while self.reducing:",
        "no reduction under way",
    ),
    Wrong(
        "last_one_left",
        "in_backward",
        "in_backward",
        FINISH,
        "        while len(self.reducing) > 1:",
        "while reduce 0 .* was under way",
    ),
    Wrong(
        "every_gradient",
        "in_backward",
        "in_backward",
        "            shard.grad = gradients.get(param)",
        "            shard.grad = gradients.get(param, param.grad)",
        "updated 2 times in|times in 2 iterations",
    ),
    Wrong(
        "never_waits",
        "in_backward",
        "in_backward",
        "            for call in self.sending:\n"
        "                call.wait()\n"
        "            self.sending.clear()",
        "            self.sending.clear()",
        "nobody waited",
    ),
    # --------------------------------------------------------------------------------------- checkpoint
    Wrong(
        "own_numbers",
        "checkpoint",
        "checkpoint",
        GATHER,
        '        mine = dict(packed["state"])\n',
        "has the keys",
    ),
    Wrong(
        "own_state",
        "checkpoint",
        "checkpoint",
        "dist.all_gather_object(of_ranks, mine)",
        "of_ranks = [mine]",
        "has the keys",
    ),
    Wrong(
        "own_parameters",
        "checkpoint",
        "checkpoint",
        '"params": list(range(len(self.params)))}\n        return',
        '"params": list(self.mine)}\n        return',
        "lists the parameters",
    ),
    Wrong(
        "loads_by_own_number",
        "checkpoint",
        "checkpoint",
        "mine = {index: state[number] for index, number in enumerate(self.mine) if number in state}",
        "mine = {index: state[index] for index, number in enumerate(self.mine)}",
        "other values|load_state_dict.. raised|size",
    ),
    Wrong(
        "loads_nothing",
        "checkpoint",
        "checkpoint",
        '        self.local.load_state_dict({"state": mine, "param_groups": [group]})\n',
        "",
        "other values",
    ),
    Wrong(
        "only_saves",
        "checkpoint",
        "checkpoint",
        "def load_state_dict",
        "def load",
        "has no `load_state_dict`",
    ),
    # ------------------------------------------------------------------------------------------ masters
    Wrong(
        "no_masters",
        "masters",
        "masters",
        ".to(master_dtype or param.dtype)",
        "",
        "steps the 16-bit parameters",
    ),
    Wrong(
        "not_copied_back",
        "masters",
        "masters",
        "                param.copy_(shard)",
        "                pass",
        "no parameter moved",
    ),
    Wrong(
        "made_anew",
        "masters",
        "masters",
        "            shard.grad = None if gradient",
        "            shard.data.copy_(param)\n            shard.grad = None if gradient",
        "no parameter moved",
    ),
    Wrong(
        "not_saved",
        "masters",
        "masters",
        '                mine[number]["master_weight"] = shard.detach()',
        "                pass",
        "master_weight",
    ),
    Wrong(
        "not_loaded",
        "masters",
        "masters",
        "self.shards[self.params[number]].data.copy_(master)",
        "pass",
        "other values",
    ),
    Wrong(
        "all_in_32",
        "masters",
        "masters",
        "        self.params = list(params)\n",
        "        self.params = list(params)\n        for param in self.params:\n"
        "            param.data = param.data.float()\n",
        "made parameters torch.float32",
    ),
]
