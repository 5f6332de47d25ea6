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
CALL = "dist.reduce(gradient[piece], group_dst=owner, group=self.group, async_op=True)"
REDUCE = f"            calls.append({CALL})\n"
WAIT = "            for call in calls:\n                call.wait()\n"
KEEP_LAST = "                shard.grad = kept\n"
ADD_UP = "                shard.grad = kept if shard.grad is None else shard.grad + kept\n"
REGISTER = "            param.register_post_accumulate_grad_hook(self.reduce)\n"
NOTE = "            param.register_post_accumulate_grad_hook(self.note)\n        self.noted = []\n"
FINISH = "    def finish(self)"
NOTING = """    def note(self, param):
        self.noted.append((param, param.grad))
        param.grad = None
"""
GROUPS = {
    "**defaults)\n\n    @torch.no_grad()\n    def step":
        "**defaults)\n        self.param_groups = self.local.param_groups\n\n"
        "    def zero_grad(self):\n        for param in self.params:\n            param.grad = None\n\n"
        "    @torch.no_grad()\n    def step"
}  # fmt: skip
"""Changes of the stair `buckets`: the rung options, which may be added to any file."""
TO_OWNERS = {"dist.all_reduce(gradient,": "dist.reduce(gradient, group_dst=self.owner_of[param],"}
"""Changes of the stair `overlap`: the rung to_owners, while parameters are whole."""
IN_BACKWARD = {
    ADD_UP: """                shard.grad = kept
                self.local.step()
                shard.grad = None
                in_memory(param)[own] = shard
            for owner, piece in self.pieces[param].items():
                dist.broadcast(in_memory(param.detach())[piece], group_src=owner)
""",
    """        # The local step needs no communication. What it makes goes into this rank's own bucket.
        self.local.step()
        for param, shard in self.shards.items():
            in_memory(param)[self.pieces[param][self.rank]] = shard  # a master is rounded to the nearest
""" + RECEIVE + SEND_BUCKETS: "",
}  # fmt: skip
"""Changes of the stair `checkpoint`: a file that has cut its parameters, and updates them in backward."""
FLAT = '''"""Its own way: one flat shard, padded."""

import torch
import torch.distributed as dist


class MyZero:
    def __init__(self, params, optimizer_class, **defaults):
        self.params, self.rank, self.size = list(params), dist.get_rank(), dist.get_world_size()
        self.share = -(-sum(param.numel() for param in self.params) // self.size)
        flat, self.starts, start = torch.zeros(self.share * self.size), {}, 0
        for param in self.params:
            part = flat[start : start + param.numel()]
            part.copy_(param.detach().as_strided((param.numel(),), (1,)))
            param.data = part.as_strided(param.shape, param.stride())
            self.starts[param], start = start, start + param.numel()
            param.register_post_accumulate_grad_hook(self.reduce)
        self.shares = flat.split(self.share)
        self.shard = torch.nn.Parameter(self.shares[self.rank])
        self.local = optimizer_class([self.shard], **defaults)
        self.zero_grad = self.local.zero_grad

    @torch.no_grad()
    def reduce(self, param):
        gradient = param.grad.as_strided((param.numel(),), (1,)) / self.size
        param.grad = None
        for owner in range(self.size):
            first = max(owner * self.share - self.starts[param], 0)
            stop = min((owner + 1) * self.share - self.starts[param], param.numel())
            if first < stop:
                piece = gradient[first:stop].clone()
                dist.reduce(piece, group_dst=owner)
                if owner == self.rank:
                    self.keep(piece, self.starts[param] + first - owner * self.share)

    def keep(self, piece, place):
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad[place : place + len(piece)] += piece

    @torch.no_grad()
    def step(self):
        self.local.step()
        for owner, share in enumerate(self.shares):
            dist.broadcast(share, group_src=owner)
'''
"""An answer to the rung shards, and to no other, that is built in another way than the stair."""

GATHERED = '''"""Written from the text of the rung stage 3 alone."""

import torch
import torch.distributed as dist
from torch import nn

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Block:
    def __init__(self, module, params, master_dtype):
        self.params = params
        n = dist.get_world_size()
        total = sum(p.numel() for p in params)
        per_rank = (total + n - 1) // n
        self.whole = torch.zeros(per_rank * n, dtype=params[0].dtype)
        start = 0
        for p in params:
            window = self.whole[start : start + p.numel()]
            window.copy_(p.detach().as_strided((p.numel(),), (1,)))
            p.data = window.as_strided(p.shape, p.stride())
            start += p.numel()
        self.nbytes = self.whole.nbytes
        rank = dist.get_rank()
        share = self.whole[rank * per_rank : (rank + 1) * per_rank]
        self.share = nn.Parameter(share.to(master_dtype or share.dtype, copy=True))
        self.there = True
        self.complete = 0
        self.free()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        for p in params:
            p.register_post_accumulate_grad_hook(self.one_complete)

    def free(self):
        self.whole.untyped_storage().resize_(0)
        self.there = False

    def gather(self):
        if self.there:
            return
        self.whole.untyped_storage().resize_(self.nbytes)
        all_gather(self.whole, self.share.detach().to(self.whole.dtype))
        self.there = True

    def before_forward(self, module, arguments):
        self.gather()

    def after_forward(self, module, arguments, output):
        self.free()
        output.register_hook(lambda gradient: self.gather())

    def one_complete(self, param):
        self.complete += 1
        if self.complete == len(self.params):
            self.reduce()

    @torch.no_grad()
    def reduce(self):
        n = dist.get_world_size()
        flat = torch.zeros(self.share.numel() * n, dtype=self.params[0].dtype)
        start = 0
        for p in self.params:
            if p.grad is not None:
                flat[start : start + p.numel()] = p.grad.as_strided((p.numel(),), (1,))
            start += p.numel()
            p.grad = None
        flat /= n
        out = torch.empty(self.share.numel(), dtype=flat.dtype)
        reduce_scatter(out, flat)
        out = out.to(self.share.dtype)
        if self.share.grad is None:
            self.share.grad = out
        else:
            self.share.grad += out
        self.complete = 0
        self.free()


class MyZero3:
    def __init__(self, model, optimizer_class, blocks=(), master_dtype=None, **defaults):
        taken = set()
        self.blocks = []
        for block in blocks:
            params = list(block.parameters())
            taken.update(params)
            self.blocks.append(Block(block, params, master_dtype))
        rest = [p for p in model.parameters() if p not in taken]
        if rest:
            self.blocks.append(Block(model, rest, master_dtype))
        self.local = optimizer_class([b.share for b in self.blocks], **defaults)
        self.zero_grad = self.local.zero_grad

    def step(self):
        for b in self.blocks:
            if b.complete:
                b.reduce()
        self.local.step()
'''
"""An answer to the rung stage_3, and to no other, that is built in another way than the stair."""

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
        ("gone_through_twice",
         {"self.params, self.group = list(params), group\n":
              "self.params, self.group = list(params), group\n        self.params = list(params)\n",
          '[{"params": [self.params[number] for number in self.mine]}]':
              "[self.params[number] for number in self.mine]"},
         r"^(?!.*may own nothing).*empty parameter list.* gone through twice.* = list\(params\)\.$"),
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
         {**GROUPS,
          "self.param_groups = self.local.param_groups":
              "self.param_groups = [dict(group) for group in self.local.param_groups]"},
         "give out its param_groups, not a copy"),
        ("only_its_own",
         {**GROUPS,
          "        for param in self.params:\n            param.grad = None\n":
              "        self.local.zero_grad()\n"},
         "still has the gradients"),
    ],
    ("shards", "to_owners"): [
        ("a_sum", {" / self.world_size, None": ", None"}, "is the sum"),
        ("averages_twice", {" / self.world_size, None": " / self.world_size**2, None"}, "ranks twice"),
        ("everywhere", {REDUCE: "            dist.all_reduce(gradient[piece])\n"}, "they came by all_reduce"),
        ("own_alone", {REDUCE: "            pass\n"}, "made of this rank's own alone"),
        ("kept", {"gradient, param.grad = in_memory(param.grad) / self.world_size, None":
                      "gradient = in_memory(param.grad) / self.world_size"}, "still holds gradients"),
        ("to_rank_0", {"group_dst=owner": "group_dst=0"}, "on rank 1"),
        ("no_hook", {REGISTER: "            pass\n"}, "register self.reduce as a hook"),
        ("only_owners_reduce", {REDUCE: "            if owner == self.rank:\n    " + REDUCE},
         "make different calls"),
        ("unequal_shares", {"-(-": "2 + ("}, "an equal share of"),
        ("everything_stepped",
         {"list(self.shards.values())": "[*self.shards.values(), torch.nn.Parameter(torch.ones(9))]"},
         "an equal share of|is None"),
        ("breaks_in_the_hook", {"own = self.shards[param], self": "own = self.shards[gradient], self"},
         r"KeyError.*wrong\.py, line \d+: shard, own"),
    ],
    ("flat", "step"): [
        ("never_forgets", {"        self.zero_grad = self.local.zero_grad\n": ""},
         r"still has 1 gradients of the step before. zero_grad\(\) has to forget"),
    ],
    ("flat", "to_owners"): [
        ("averages_in_step",
         {"                    self.keep(piece,": "                    self.later.append((piece,",
          "- owner * self.share)\n\n    def": "- owner * self.share))\n\n    def",
          "        self.local.step()\n":
              "        for each in self.later:\n            self.keep(*each)\n"
              "        self.local.step()\n        self.later = []\n",
          "        self.shares = ": "        self.later = []\n        self.shares = "},
         "is None. Each average has to be in .grad of what its owner steps when backward is over"),
    ],
    ("overlap", "to_owners"): [
        ("all_reduced", {}, "every average to every rank, by all_reduce"),
        ("other_owners",
         {**TO_OWNERS,
          "self.owners = assign_owners(": "self.owners = (lambda sizes, n: [0 for _ in sizes])("},
         "owns the parameters .* and its local optimizer steps others"),
    ],
    ("overlap", "in_backward"): [
        ("twice",
         {"        self.finish()\n        while":
              "        self.finish()\n        for number in self.mine:\n"
              "            self.params[number].grad = torch.zeros_like(self.params[number])\n"
              "        self.local.step()\n        while"},
         "updated 2 times in|times in 2 iterations"),
        ("stands_still",
         {"        self.reducing = [(param, gradient, call)]\n":
              "        self.reducing = [(param, gradient, call)]\n        self.finish()\n"},
         "no reduction under way"),
        ("last_one_left", {"        self.finish()\n        while": "        while"},
         "while all_reduce .* was under way"),
        ("every_gradient", {"                param.grad = None\n": ""}, "times in 1 iterations"),
        ("never_waits",
         {"        while self.sending:\n            self.sending.pop(0).wait()":
              "        self.sending.clear()"},
         "nobody waited"),
    ],
    ("shards", "in_backward"): [
        ("all_at_the_end", {"group=self.group, async_op=True))": "group=self.group))", WAIT: ""},
         "backward makes no broadcast"),
        ("meanwhile_but_wrong", {ADD_UP: KEEP_LAST}, "backward makes no broadcast"),
    ],
    ("shards", "shards"): [
        ("sum_not_averaged", {" / self.world_size, None": ", None"}, "is the sum over the ranks"),
        ("full_gradient_kept",
         {"gradient, param.grad = in_memory(param.grad) / self.world_size, None":
              "gradient = in_memory(param.grad) / self.world_size"},
         "still holds gradients of the parameters"),
        ("memory_of_the_whole_kept", {"gradient[own].clone()": "gradient[own]"},
         r"rank 0 holds \d+ bytes of gradients, and its share has 140 of 276. A slice keeps the memory"),
        ("reduces_after_backward",
         {REGISTER: NOTE, FINISH: NOTING + "\n" + FINISH,
          "        self.finish()\n        # The local":
              "        for param, param.grad in self.noted:\n            self.reduce(param)\n"
              "        self.finish()\n        self.noted = []\n        # The local"},
         "when it ends each rank has held all"),
        ("reduces_when_the_last_has_come",
         {REGISTER: NOTE,
          FINISH: NOTING + "        if param is self.params[0]:\n"
                           "            for each, each.grad in self.noted:\n"
                           "                self.reduce(each)\n            self.noted = []\n\n" + FINISH},
         r"in the middle of backward rank 0 holds \d+ bytes .* later is too late"),
        ("only_the_last_backward", {ADD_UP: KEEP_LAST}, "the last backward alone"),
        ("mean_of_backwards", {" / self.world_size, None": " / self.world_size / 3, None"},
         "divided by the number of backwards"),
        ("never_forgets",
         {"        self.zero_grad = self.local.zero_grad  # only shards keep gradients\n": ""},
         r"gradients of the step before. zero_grad\(\) has to forget"),
        ("everywhere_and_cut", {REDUCE: "            dist.all_reduce(gradient[piece])\n"},
         "they came by all_reduce"),
    ],
    ("flat", "shards"): [
        ("wrong_share",
         {"group_dst=owner)\n                if owner == self.rank":
              "group_dst=(owner + 1) % self.size)\n                if (owner + 1) % self.size == self.rank"},
         "the average of elements that rank 1 owns. Take this rank's own share"),
        ("padding_lost",
         {"-(-sum(param.numel() for param in self.params) // self.size)":
              "sum(param.numel() for param in self.params) // self.size",
          "torch.zeros(self.share * self.size)":
              "torch.zeros(sum(param.numel() for param in self.params))"},
         "rounded down, it leaves the last elements to nobody"),
        ("stored_too", {"piece = gradient[first:stop].clone()": "piece = gradient[first:stop].clone()\n"
                        "                self.whole = {**getattr(self, 'whole', {}), param: gradient}"},
         r"rank 0 holds [\d,]+ bytes of gradients"),
    ],
    ("parameters", "stage_3"): [
        ("keeps_after_forward",
         {"            self.free()\n            for tensor in": "            for tensor in"},
         r"in the forward of block \d rank 0 holds .* Free a block after its forward"),
        ("not_gathered_for_backward",
         {"() >= 0\n        self.gather()\n":
              "() >= 0\n        if not self.in_backward:\n            self.gather()\n"},
         r"the backward of block 5 finds its parameters freed.* gather again in a hook of the output"),
        ("steps_a_copy", {"torch.nn.Parameter(part)": "torch.nn.Parameter(part.clone())"},
         "values from before step 1. Gather the share that self.local steps, not a copy"),
        ("sum_not_averaged", {".div_(self.world_size)": ""},
         "are 3 times the averages .* divide by the number of ranks, which is 3, once"),
        ("averages_twice", {".div_(self.world_size)": ".div_(self.world_size**2)"}, "are 0.3333 times"),
        ("averages_over_uses", {".div_(self.world_size)": ".div_(2 * self.world_size)"}, "are 0.5 times"),
        ("freed_with_the_first_gradient",
         {"if all(param.grad is not None": "if any(param.grad is not None"},
         "the backward of block 5 finds its parameters freed.* of all parameters of the block"),
        ("never_freed",
         {"        self.whole.untyped_storage().resize_(0)\n        for param in self.params:\n": "",
          "            param.data = self.whole[:0]": "        pass"},
         r"after MyZero3\(.* holds [\d,]+ bytes of whole parameters. Free them when the shares are copied"),
        ("keeps_after_backward",
         {"        self.in_backward = False\n        self.free()\n": "        self.in_backward = False\n"},
         r"in the backward of block \d rank 0 holds .* when the gradients of all its parameters are"),
        ("waits_for_the_unused",
         {"            block.reduce()  #": "            while block.in_backward:\n                pass  #"},
         r"did not come to an end.* rank 0 stood in step, line \d\d"),
        ("one_rank_reduces_the_unused",
         {"block.in_backward, self.blocks": "block.in_backward and not dist.get_rank(), self.blocks"},
         "the ranks make different calls, so some would wait for ever: rank 0 calls reduce_scatter"),
        ("leaves_the_unused",
         {"            block.reduce()  #": "            pass  #"},
         "a parameter of block 2 is not used, .* step.. has to reduce what is left, and free it"),
        ("stumbles_over_the_unused", {"            if param.grad is not None:\n                part":
                                          "            if True:\n                part"},
         r"raised .*wrong\.py, line \d+"),
    ],
    ("gathered", "stage_3"): [
        ("reduces_for_each_use",
         {"        for p in params:\n            p.register":
              "        if not hasattr(module, 'blocks'):\n"
              "            module.register_full_backward_hook(lambda *_: self.reduce())\n"
              "        for p in params if hasattr(module, 'blocks') else []:\n            p.register"},
         r"something is reduced twice. Block 1 is used twice in a forward"),
        ("parameters_in_master_dtype",
         {"self.whole = torch.zeros(per_rank * n, dtype=params[0].dtype)":
              "self.whole = torch.zeros(per_rank * n, dtype=master_dtype or params[0].dtype)"},
         "the forward of the model's own parameters finds torch.float32 in its parameters, which are "
         "torch.bfloat16: only shares"),
        ("shares_in_16_bits", {"master_dtype or share.dtype": "share.dtype"},
         "with master_dtype=torch.float32 the local optimizer steps torch.bfloat16"),
        ("gathers_masters", {".to(self.whole.dtype))": ")"}, "raised|never had"),
        ("new_memory_each_time",
         {"        self.whole.untyped_storage().resize_(self.nbytes)\n":
              "        self.whole = torch.zeros(self.nbytes // self.share.itemsize)\n",
          "        self.there = True\n\n":
              "        self.there, start = True, 0\n"
              "        for p, shape, stride in self.forms:\n"
              "            p.data = self.whole.as_strided(shape, stride, start)\n"
              "            start += p.numel()\n\n",
          "        self.there = False\n":
              "        self.whole, self.there = torch.zeros(0), False\n"
              "        for p in self.params:\n            p.data = torch.zeros(0)\n",
          "        self.nbytes =": "        self.forms = [(p, p.shape, p.stride()) for p in params]\n"
                                   "        self.nbytes =",
          "        self.whole.untyped_storage().resize_(0)\n": ""},
         r"in the forward of block \d rank 0 holds .* also those that autograd has kept"),
        ("forgets_the_root", {"        if rest:\n": "        if not rest:\n"},
         "What no block has belongs to the model, which gathers it too"),
        ("slice_of_what_is_freed", {"share.to(master_dtype or share.dtype, copy=True)": "share"},
         "what self.local steps on rank 0 has no memory"),
        ("gathered_into_no_memory", {"        self.whole.untyped_storage().resize_(self.nbytes)\n": ""},
         r"dist\.all_gather\w+ was given a tensor whose memory was freed"),
        ("share_kept_twice",
         {"        self.there = True\n        self.complete":
              "        self.there, self.old = True, self.share.clone()\n        self.complete"},
         r"rank 0 holds [\d,]+ bytes between iterations, and its shares with their state have [\d,]+"),
        ("not_gathered_for_forward", {"        module.register_forward_pre_hook(self.before_forward)\n": ""},
         "the forward of the model's own parameters finds its parameters freed. Gather them in a hook"),
        ("gradients_kept", {"            p.grad = None\n": ""},
         r"after backward rank 0 holds [\d,]+ bytes more .* Set param.grad to None"),
        ("last_backward_alone", {"self.share.grad += out": "self.share.grad = out"},
         "those of the last backward alone"),
        ("all_reduced_whole",
         {"        reduce_scatter(out, flat)\n":
              "        dist.all_reduce(flat)\n"
              "        out = flat.chunk(n)[dist.get_rank()].clone()\n"},
         "backward calls all_reduce, which takes whole gradients to every rank"),
        ("reduces_in_step",
         {"            self.reduce()\n\n    @": "            self.free()\n\n    @",
          "            if b.complete:": "            if any(p.grad is not None for p in b.params):"},
         "backward reduces no gradient. Register a hook"),
        ("moves_the_unused",
         {"            if b.complete:": "            if b.complete or b.share.grad is None:"},
         "values that moved in an iteration that did not use the block"),
        ("waits_for_one_another", {"        self.gather()\n\n    def after_forward":
            "        if dist.get_rank() == 0:\n            self.gather()\n\n    def after_forward"},
         "the ranks make different calls|finds its parameters freed"),
    ],
    ("checkpoint", "checkpoint"): [
        ("own_numbers", {"                mine[number] = {": "                mine[len(mine)] = {"},
         "has the keys|is not what the unsharded|raised"),
        ("own_state", {"dist.all_gather_object(of_ranks, mine, self.group)": "of_ranks = [mine]"},
         "has the keys|raised"),
        ("own_parameters",
         {"zip(self.param_groups, self.groups)": "zip(self.param_groups, self.param_groups)"},
         "lists the parameters"),
        ("pieces_in_another_order", {"torch.cat(cuts)": "torch.cat(cuts[::-1])"},
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
        ("only_saves", {"def load_state_dict": "def load"}, "has no `load_state_dict`"),
    ],
    ("checkpoint", "masters"): [
        ("no_masters", {".to(master_dtype or param.dtype)": ""}, "steps the 16-bit parameters"),
        ("not_copied_back",
         {"            in_memory(param)[self.pieces[param][self.rank]] = shard": "            pass"},
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
"""The mistakes, by the stair that they are made in and the rung that finds them."""
