"""The reader's own file: mistakes, each a change of a stair, with what the check must say."""

from __future__ import annotations

from typing import NamedTuple


class Wrong(NamedTuple):
    """A mistake: in the answer of `stair`, `old` becomes `new`; the check of `rung` then says `message`."""

    name: str
    stair: str
    rung: str
    old: str
    new: str
    message: str


SEND_PARAMETERS = """        for param, owner in zip(self.params, self.owners):
            dist.broadcast(param, group_src=owner, group=self.group)
"""
SEND_BUCKETS = """        for owner, bucket in self.buckets.items():
            dist.broadcast(bucket, group_src=owner, group=self.group)
"""
RECEIVE = (
    "        # All ranks make all broadcasts, in the same order: "
    "the owner sends, the others receive in place.\n"
)
REDUCE = "            dist.reduce(gradient[piece], group_dst=owner, group=self.group)\n"

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
    Wrong("sends_nothing", "owners", "step", SEND_PARAMETERS, "", "did not arrive there"),
    Wrong("never_steps", "owners", "step", "        self.local.step()\n", "", "Was self.local.step.. called"),
    Wrong(
        "sends_first",
        "owners",
        "step",
        "        self.local.step()\n" + RECEIVE + SEND_PARAMETERS,
        SEND_PARAMETERS + "        self.local.step()\n",
        "Step first, then send",
    ),
    Wrong("rank_0_sends", "owners", "step", "group_src=owner", "group_src=0", "sent by its own owner"),
    Wrong(
        "only_owners_call",
        "owners",
        "step",
        "            dist.broadcast(param,",
        "            if owner == self.rank:\n                dist.broadcast(param,",
        "make different calls",
    ),
    Wrong(
        "forgets_to_wait",
        "owners",
        "step",
        "group_src=owner,",
        "async_op=True, group_src=owner,",
        "nobody waited",
    ),
    Wrong(
        "keeps_all_state",
        "owners",
        "step",
        "[self.params[number] for number in self.mine]",
        "self.params",
        "keeps state for 4 parameters, and it owns",
    ),
    Wrong(
        "empty_list",
        "owners",
        "step",
        '[{"params": [self.params[number] for number in self.mine]}]',
        "[self.params[number] for number in self.mine]",
        "A rank may own nothing",
    ),
    Wrong(
        "generator",
        "owners",
        "step",
        "self.params, self.group = list(params), group\n",
        "self.params, self.group = params, group\n        params = list(params)\n",
        "generator|list index|not subscriptable",
    ),
    Wrong(
        "other_owners",
        "owners",
        "step",
        "self.owners = assign_owners(",
        "self.owners = (lambda sizes, n: [i % n for i in range(len(sizes))])(",
        "updates|old even there|owns",
    ),
    Wrong("no_local", "owners", "step", "self.local", "self.inner", "has no `local`"),
    Wrong(
        "averages",
        "owners",
        "step",
        "            dist.broadcast(param, group_src=owner, group=self.group)",
        "            dist.all_reduce(param)\n            param /= dist.get_world_size()",
        "added to the others'",
    ),
    Wrong(
        "typo",
        "owners",
        "step",
        "self.local.step()",
        "self.locale.step()",
        r"AttributeError.*wrong\.py, line \d+: self\.locale",
    ),
    Wrong(
        "hangs",
        "owners",
        "step",
        "        self.local.step()\n",
        "        while dist.get_rank() == 0:\n            pass\n        self.local.step()\n",
        r"rank 0 stood in step, line \d\d",
    ),
    Wrong(
        "exits",
        "owners",
        "step",
        "        self.local.step()\n",
        "        import os\n        os._exit(3)\n",
        "exit code 3",
    ),
    Wrong(
        "with_autograd",
        "owners",
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
        "torch.cat([in_memory(param) for param in params])",
        "torch.zeros(sum(param.numel() for param in params))",
        "changed the values",
    ),
    Wrong(
        "copies",
        "owners",
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
        "            dist.broadcast(bucket, group_src=owner, group=self.group)",
        "            if owner != dist.get_rank():\n"
        "                bucket.zero_()\n"
        "            dist.all_reduce(bucket)",
        "calls all_reduce",
    ),
    # ------------------------------------------------------------------------------------------ options
    Wrong(
        "a_copy",
        "buckets",
        "options",
        "self.param_groups = self.local.param_groups",
        "self.param_groups = [dict(group) for group in self.local.param_groups]",
        "give out its param_groups, not a copy",
    ),
    Wrong(
        "only_its_own",
        "buckets",
        "options",
        "        for param in self.params:\n            param.grad = None\n",
        "        self.local.zero_grad()\n",
        "still has the gradients",
    ),
    # ---------------------------------------------------------------------------------------- to owners
    Wrong("a_sum", "shards", "to_owners", " / self.world_size\n", "\n", "is the sum"),
    Wrong(
        "averages_twice", "shards", "to_owners", "/ self.world_size", "/ self.world_size**2", "ranks twice"
    ),
    Wrong(
        "everywhere",
        "shards",
        "to_owners",
        REDUCE,
        "            dist.all_reduce(gradient[piece])\n",
        "they came by all_reduce",
    ),
    Wrong("own_alone", "shards", "to_owners", REDUCE, "            pass\n", "made of this rank's own alone"),
    Wrong("kept", "shards", "to_owners", "        param.grad = None\n", "", "still holds gradients"),
    Wrong("to_rank_0", "shards", "to_owners", "group_dst=owner", "group_dst=0", "on rank 1"),
    Wrong(
        "no_hook",
        "shards",
        "to_owners",
        "            param.register_post_accumulate_grad_hook(self.reduce)\n",
        "            pass\n",
        "register self.reduce as a hook",
    ),
    Wrong(
        "only_owners_reduce",
        "shards",
        "to_owners",
        REDUCE,
        "            if owner == self.rank:\n    " + REDUCE,
        "make different calls",
    ),
    Wrong(
        "unequal_shares",
        "shards",
        "to_owners",
        "-(-",
        "2 + (",
        "an equal share of",
    ),
    Wrong(
        "everything_stepped",
        "shards",
        "to_owners",
        "if p in mine]} for g",
        "if p in mine] + [torch.nn.Parameter(torch.ones(9))]} for g",
        "an equal share of|is None",
    ),
    Wrong(
        "breaks_in_the_hook",
        "shards",
        "to_owners",
        "own = self.shards[param], gradient",
        "own = self.shards[gradient], gradient",
        r"KeyError.*wrong\.py, line \d+: shard, own",
    ),
    # -------------------------------------------------------------------------------------- in backward
    Wrong(
        "twice",
        "overlap",
        "in_backward",
        "        self.update()\n        while",
        "        self.update()\n        for shard in self.shards.values():\n"
        "            shard.grad = torch.zeros_like(shard)\n        self.local.step()\n        while",
        "updated 2 times in|times in 2 iterations",
    ),
    Wrong(
        "never_forgotten",
        "overlap",
        "in_backward",
        "(param, gradient, calls), self.reducing = self.reducing, None",
        "param, gradient, calls = self.reducing",
        "updated 2 times in|times in 2 iterations",
    ),
    Wrong(
        "all_at_the_end",
        "shards",
        "in_backward",
        "group_dst=owner, group=self.group)",
        "group_dst=owner, async_op=True).wait()",
        "backward makes no broadcast",
    ),
    Wrong(
        "stands_still",
        "overlap",
        "in_backward",
        "        self.reducing = param, gradient, calls\n",
        "        self.reducing = param, gradient, calls\n        self.update()\n",
        "no reduction under way",
    ),
    Wrong(
        "last_one_left",
        "overlap",
        "in_backward",
        "        self.update()\n        while",
        "        while",
        "while reduce .* was under way",
    ),
    Wrong(
        "every_gradient",
        "overlap",
        "in_backward",
        "            shard.grad = None\n",
        "",
        "times in 1 iterations",
    ),
    Wrong(
        "never_waits",
        "overlap",
        "in_backward",
        "        while self.sending:\n            self.sending.pop(0).wait()",
        "        self.sending.clear()",
        "nobody waited",
    ),
    Wrong(
        "takes_it_too_early",
        "overlap",
        "in_backward",
        "        for call in calls:\n            call.wait()\n",
        "",
        "nobody waited",
    ),
    # --------------------------------------------------------------------------------------- checkpoint
    Wrong(
        "own_numbers",
        "checkpoint",
        "checkpoint",
        "                mine[number] = {",
        "                mine[len(mine)] = {",
        "has the keys|is not what the unsharded|raised",
    ),
    Wrong(
        "own_state",
        "checkpoint",
        "checkpoint",
        "dist.all_gather_object(of_ranks, mine, self.group)",
        "of_ranks = [mine]",
        "has the keys|raised",
    ),
    Wrong(
        "own_parameters",
        "checkpoint",
        "checkpoint",
        "numbered(self.param_groups, self.groups)}",
        "numbered(self.param_groups, self.param_groups)}",
        "lists the parameters",
    ),
    Wrong(
        "pieces_in_another_order",
        "checkpoint",
        "checkpoint",
        "torch.cat(cuts)",
        "torch.cat(cuts[::-1])",
        "is not what the unsharded optimizer has there",
    ),
    Wrong(
        "one_piece",
        "checkpoint",
        "checkpoint",
        "torch.cat(cuts).as_strided(param.shape, param.stride())",
        "cuts[0]",
        "is not what the unsharded optimizer has there",
    ),
    Wrong(
        "loads_by_own_number",
        "checkpoint",
        "checkpoint",
        'state_dict["state"].get(number, {})',
        'state_dict["state"].get(len(self.local.state), {})',
        "A tensor of the state is another",
    ),
    Wrong(
        "loads_the_first_elements",
        "checkpoint",
        "checkpoint",
        "copy_(value))[own]",
        "copy_(value))[: shard.numel()]",
        "other values",
    ),
    Wrong(
        "loads_nothing",
        "checkpoint",
        "checkpoint",
        "                self.local.state[shard] = state\n",
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
        "checkpoint",
        "masters",
        ".to(master_dtype or param.dtype)",
        "",
        "steps the 16-bit parameters",
    ),
    Wrong(
        "not_copied_back",
        "checkpoint",
        "masters",
        "            flat[own] = shard",
        "            pass",
        "no parameter moved",
    ),
    Wrong(
        "made_anew",
        "checkpoint",
        "masters",
        "            shard.grad = gradient",
        "            shard.data.copy_(flat[own])\n            shard.grad = gradient",
        "no parameter moved",
    ),
    Wrong(
        "not_saved",
        "checkpoint",
        "masters",
        "**masters}",
        "}",
        "master_weight",
    ),
    Wrong(
        "not_loaded",
        "checkpoint",
        "masters",
        'shard.copy_(state.pop("master_weight", in_memory(param)[own]))',
        'state.pop("master_weight", None)',
        "other values",
    ),
    Wrong(
        "all_in_32",
        "checkpoint",
        "masters",
        "        # The plan: ",
        "        for param in self.params:\n"
        "            param.data = param.data.float()\n        # The plan: ",
        "made parameters torch.float32",
    ),
    Wrong(
        "whole_on_rank_0_alone",
        "checkpoint",
        "checkpoint",
        "dist.all_gather_object(of_ranks, mine, self.group)",
        "dist.gather_object(mine, of_ranks if self.rank == 0 else None, 0, self.group)",
        r"whole state on rank 0, and on rank 1 of 3 it does not\. .* as dist\.all_gather_object does",
    ),
    Wrong(
        "loses_strides",
        "buckets",
        "buckets",
        "part.as_strided(param.shape, param.stride())",
        "part.view(param.shape)",
        r"strides of parameter 0 \(7, 1\), and they were \(1, 5\): a transposed matrix was laid out anew",
    ),
]
