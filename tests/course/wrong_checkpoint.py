"""Chapter 10: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

RUN_GOES_ON = "if found and"
FILL = """                if key not in of_param:
                    of_param[key] = torch.empty(shapes[piece.param])
                of_param[key].view(-1)[piece.start : piece.stop] = state[key]
"""
WRITE = '        disk.write(f"{name}.unfinished", shard)\n'
RENAME = '        disk.rename(f"{name}.unfinished", name)\n'
REMOVE = """    for name in disk.names():
        if not name.startswith(f"save-{number}/"):
            disk.remove(name)"""

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
    "checkpoint.save": [
        ("removes_first", {REMOVE: "", "    for rank": REMOVE + "\n    for rank"},
         r"killed in write\(.* finds no complete save"),
        ("starts_in_the_old_folder",
         {"{number}/shard": "{n}/shard", "for rank, shard in enumerate(shards)":
          "for n, rank, shard in [(n, *each) for n in (number - 1, number) for each in enumerate(shards)]"},
         r"shards of two saves side by side"),
        ("forgets_what_killed_saves_leave", {"if not": "if", "{number}/\"": "{number - 1}/\""},
         r"save number 11 there still are \['save-9/shard-0-of-1'"),
        ("mixes_up_the_ranks", {"enumerate(shards)": "enumerate(shards[::-1])"},
         r"each in the file of its rank"),
        ("never_renames", {RENAME: "", REMOVE: ""}, r"shard-0-of-1' is missing"),
        ("tidies_up_when_killed",
         {WRITE: "        try:\n            disk.write(name, shard)\n"
                 "        except BaseException:\n            return\n", RENAME: ""},
         r"takes the half of shard 0 for the whole"),
    ],
    "checkpoint.newest_common": [
        ("the_oldest", {"return max(": "return min("}, r"oldest save that all ranks have"),
        ("lists_of_any_length", {" + [0] * (longest - len(intact))": ""},
         r"wait for each other.* must have one shape on all"),
        ("a_set", {"return max(common, default=None)": "return common"},
         r"must return the number of a save, or None"),
    ],
}  # fmt: skip
