"""The reader's own file: mistakes, each as changes of a stair's answer, with what the check must say."""

from __future__ import annotations

LOADS = "    loads = [0] * world_size\n"
STEP = "        self.local.step()\n"
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

CHANGED = {
    ("owners", "owners"): [
        ("smallest_first", {"-numels[number]": "numels[number]"}, "it belongs to rank 0"),
        ("unsorted", {"sorted(range(len(numels)), key=lambda number: -numels[number])": "range(len(numels))"},
         "registration order"),
        ("no_return", {"    return owners\n": ""}, "returned None"),
        ("own_rank_first",
         {LOADS: "    import torch.distributed as dist\n\n" + LOADS + "    loads[dist.get_rank()] = 1\n"},
         "not the same on all ranks"),
        ("does_not_end", {LOADS: "    while True:\n        pass\n"}, "did not return within"),
        ("syntax", {"    return owners": "    return owners)"}, "SyntaxError"),
    ],
    ("owners", "step"): [
        ("sends_nothing", {SEND_PARAMETERS: ""}, "did not arrive there"),
        ("never_steps", {STEP: ""}, "Was self.local.step.. called"),
        ("sends_first", {STEP + RECEIVE + SEND_PARAMETERS: SEND_PARAMETERS + STEP}, "Step first, then send"),
        ("rank_0_sends", {"group_src=owner": "group_src=0"}, "sent by its own owner"),
        ("only_owners_call",
         {"            dist.broadcast(param,":
              "            if owner == self.rank:\n                dist.broadcast(param,"},
         "make different calls"),
        ("forgets_to_wait", {"group_src=owner,": "async_op=True, group_src=owner,"}, "nobody waited"),
        ("keeps_all_state", {"[self.params[number] for number in self.mine]": "self.params"},
         "keeps state for 4 parameters, and it owns"),
        ("empty_list",
         {'[{"params": [self.params[number] for number in self.mine]}]':
              "[self.params[number] for number in self.mine]"},
         "A rank may own nothing"),
        ("generator",
         {"self.params, self.group = list(params), group\n":
              "self.params, self.group = params, group\n        params = list(params)\n"},
         "generator|list index|not subscriptable"),
        ("other_owners",
         {"self.owners = assign_owners(":
              "self.owners = (lambda sizes, n: [i % n for i in range(len(sizes))])("},
         "updates|old even there|owns"),
        ("no_local", {"self.local": "self.inner"}, "has no `local`"),
        ("averages",
         {"            dist.broadcast(param, group_src=owner, group=self.group)":
              "            dist.all_reduce(param)\n            param /= dist.get_world_size()"},
         "added to the others'"),
        ("typo", {"self.local.step()": "self.locale.step()"},
         r"AttributeError.*wrong\.py, line \d+: self\.locale"),
        ("hangs", {STEP: "        while dist.get_rank() == 0:\n            pass\n" + STEP},
         r"rank 0 stood in step, line \d\d"),
        ("exits", {STEP: "        import os\n        os._exit(3)\n"}, "exit code 3"),
        ("with_autograd",
         {STEP: STEP + "        with torch.enable_grad():\n            self.params[0].mul_(1)\n"},
         "Put @torch.no_grad"),
    ],
    ("buckets", "buckets"): [
        ("one_call_each", {SEND_BUCKETS: SEND_PARAMETERS}, "8 broadcasts, and 2 ranks own"),
        ("values_left_behind",
         {"torch.cat([in_memory(param) for param in params])":
              "torch.zeros(sum(param.numel() for param in params))"},
         "changed the values"),
        ("sends_a_copy", {"dist.broadcast(bucket,": "dist.broadcast(bucket.clone(),"},
         "did not arrive there"),
        ("loses_strides", {"part.as_strided(param.shape, param.stride())": "part.view(param.shape)"},
         r"strides of parameter 0 \(7, 1\), and they were \(1, 5\): a transposed matrix was laid out anew"),
        ("all_to_all",
         {"            dist.broadcast(bucket, group_src=owner, group=self.group)":
              "            if owner != dist.get_rank():\n"
              "                bucket.zero_()\n"
              "            dist.all_reduce(bucket)"},
         "calls all_reduce"),
    ],
    ("owners", "buckets"): [
        ("copies",
         {SEND_PARAMETERS: """        for owner in sorted(set(self.owners)):
            of_owner = [param for param, its in zip(self.params, self.owners) if its == owner]
            flat = torch.cat([param.flatten() for param in of_owner])
            dist.broadcast(flat, group_src=owner)
            for param, values in zip(of_owner, flat.split([param.numel() for param in of_owner])):
                param.copy_(values.view(param.shape))
"""},
         "copied together"),
    ],
    ("buckets", "options"): [
        ("a_copy",
         {"self.param_groups = self.local.param_groups":
              "self.param_groups = [dict(group) for group in self.local.param_groups]"},
         "give out its param_groups, not a copy"),
        ("only_its_own",
         {"        for param in self.params:\n            param.grad = None\n":
              "        self.local.zero_grad()\n"},
         "still has the gradients"),
    ],
    ("shards", "to_owners"): [
        ("a_sum", {" / self.world_size\n": "\n"}, "is the sum"),
        ("averages_twice", {"/ self.world_size": "/ self.world_size**2"}, "ranks twice"),
        ("everywhere", {REDUCE: "            dist.all_reduce(gradient[piece])\n"}, "they came by all_reduce"),
        ("own_alone", {REDUCE: "            pass\n"}, "made of this rank's own alone"),
        ("kept", {"        param.grad = None\n": ""}, "still holds gradients"),
        ("to_rank_0", {"group_dst=owner": "group_dst=0"}, "on rank 1"),
        ("no_hook",
         {"            param.register_post_accumulate_grad_hook(self.reduce)\n": "            pass\n"},
         "register self.reduce as a hook"),
        ("only_owners_reduce", {REDUCE: "            if owner == self.rank:\n    " + REDUCE},
         "make different calls"),
        ("unequal_shares", {"-(-": "2 + ("}, "an equal share of"),
        ("everything_stepped",
         {"if p in mine]} for g": "if p in mine] + [torch.nn.Parameter(torch.ones(9))]} for g"},
         "an equal share of|is None"),
        ("breaks_in_the_hook",
         {"own = self.shards[param], gradient": "own = self.shards[gradient], gradient"},
         r"KeyError.*wrong\.py, line \d+: shard, own"),
    ],
    ("overlap", "in_backward"): [
        ("twice",
         {"        self.update()\n        while":
              "        self.update()\n        for shard in self.shards.values():\n"
              "            shard.grad = torch.zeros_like(shard)\n        self.local.step()\n        while"},
         "updated 2 times in|times in 2 iterations"),
        ("never_forgotten",
         {"(param, gradient, calls), self.reducing = self.reducing, None":
              "param, gradient, calls = self.reducing"},
         "updated 2 times in|times in 2 iterations"),
        ("stands_still",
         {"        self.reducing = param, gradient, calls\n":
              "        self.reducing = param, gradient, calls\n        self.update()\n"},
         "no reduction under way"),
        ("last_one_left", {"        self.update()\n        while": "        while"},
         "while reduce .* was under way"),
        ("every_gradient", {"            shard.grad = None\n": ""}, "times in 1 iterations"),
        ("never_waits",
         {"        while self.sending:\n            self.sending.pop(0).wait()":
              "        self.sending.clear()"},
         "nobody waited"),
        ("takes_it_too_early", {"        for call in calls:\n            call.wait()\n": ""},
         "nobody waited"),
    ],
    ("shards", "in_backward"): [
        ("all_at_the_end", {"group_dst=owner, group=self.group)": "group_dst=owner, async_op=True).wait()"},
         "backward makes no broadcast"),
    ],
    ("checkpoint", "checkpoint"): [
        ("own_numbers", {"                mine[number] = {": "                mine[len(mine)] = {"},
         "has the keys|is not what the unsharded|raised"),
        ("own_state", {"dist.all_gather_object(of_ranks, mine, self.group)": "of_ranks = [mine]"},
         "has the keys|raised"),
        ("own_parameters",
         {"numbered(self.param_groups, self.groups)}": "numbered(self.param_groups, self.param_groups)}"},
         "lists the parameters"),
        ("pieces_in_another_order", {"torch.cat(cuts)": "torch.cat(cuts[::-1])"},
         "is not what the unsharded optimizer has there"),
        ("one_piece", {"torch.cat(cuts).as_strided(param.shape, param.stride())": "cuts[0]"},
         "is not what the unsharded optimizer has there"),
        ("loads_by_own_number",
         {'state_dict["state"].get(number, {})': 'state_dict["state"].get(len(self.local.state), {})'},
         "A tensor of the state is another"),
        ("loads_the_first_elements", {"copy_(value))[own]": "copy_(value))[: shard.numel()]"},
         "other values"),
        ("whole_on_rank_0_alone",
         {"dist.all_gather_object(of_ranks, mine, self.group)":
              "dist.gather_object(mine, of_ranks if self.rank == 0 else None, 0, self.group)"},
         r"whole state on rank 0, and on rank 1 of 3 it does not\. .* as dist\.all_gather_object does"),
        ("loads_nothing", {"                self.local.state[shard] = state\n": ""}, "other values"),
        ("only_saves", {"def load_state_dict": "def load"}, "has no `load_state_dict`"),
    ],
    ("checkpoint", "masters"): [
        ("no_masters", {".to(master_dtype or param.dtype)": ""}, "steps the 16-bit parameters"),
        ("not_copied_back", {"            flat[own] = shard": "            pass"}, "no parameter moved"),
        ("made_anew",
         {"            shard.grad = gradient":
              "            shard.data.copy_(flat[own])\n            shard.grad = gradient"},
         "no parameter moved"),
        ("not_saved", {"**masters}": "}"}, "master_weight"),
        ("not_loaded",
         {'shard.copy_(state.pop("master_weight", in_memory(param)[own]))':
              'state.pop("master_weight", None)'},
         "other values"),
        ("all_in_32",
         {"        # The plan: ": "        for param in self.params:\n"
                                  "            param.data = param.data.float()\n        # The plan: "},
         "made parameters torch.float32"),
    ],
}  # fmt: skip
"""Of which stair's answer, and which rung's check: the mistakes."""
