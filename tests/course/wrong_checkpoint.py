"""Chapter 10: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

RUN_GOES_ON = "if found and"
FILL = """                if key not in of_param:
                    of_param[key] = torch.empty(shapes[piece.param])
                of_param[key].view(-1)[piece.start : piece.stop] = state[key]
"""

CHANGED = {
    "checkpoint.reads": [
        ("joins_nothing", {RUN_GOES_ON: "if False and"}, r"right elements, in 3 reads where 2 are enough"),
        ("the_whole_files",
         {"return found": "return [(src, 0, old.loads[src]) for src in sorted({read[0] for read in found})]"},
         r"192 elements in all, and the rank is to own 128"),
        ("all_reads_of_the_first_file", {"return found": "return [(0, *read[1:]) for read in found]"},
         r"number 0 of parameter 0; the rank.s is number 192"),
    ],
    "checkpoint.consolidate": [
        ("one_after_the_other",
         {FILL: "                of_param.setdefault(key, []).append(state[key])\n",
          "    return": "    for param, state in whole.items():\n"
                       "        for key in state.keys() - {'step'}:\n"
                       "            state[key] = torch.cat(state[key]).view(shapes[param])\n    return"},
         r"right elements in the wrong order.* its `start`"),
        ("from_the_start_each",
         {"torch.empty": "torch.zeros", "[piece.start : piece.stop]": "[: piece.numel]"},
         r"wrong elements of 384"),
        ("flat", {"torch.empty(shapes[piece.param])": "torch.empty(partition.numels[piece.param])"},
         r"'exp_avg' has the shape \(384,\); its parameter has \(16, 24\)"),
        ("adds_up_the_steps",
         {'state["step"].clone()})': '0})\n            of_param["step"] = of_param["step"] + state["step"]'},
         r"'step' is 4, after 2 steps"),
        ("zeros_for_the_unused",
         {"whole.items()": '({n: {"step": torch.tensor(0.0)} for n in range(len(shapes))} | whole).items()'},
         r"a parameter that never had a gradient has no state"),
        ("keeps_the_shards_memory",
         {FILL: FILL + "                if piece.numel == partition.numels[piece.param]:\n"
                       "                    of_param[key] = state[key].view(shapes[piece.param])\n"},
         r"lies in the memory of a shard"),
    ],
}  # fmt: skip
