"""Chapter 10: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

FIRST = "before + start - piece.start"
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
AS_WRITTEN = "sha256(data).hexdigest() == table.sha256"
ALL_TABLES = "len(tables) == tables[0].ranks"
FOUND = 'return directory / f"save-{number}"\n'

CHANGED = {
    "checkpoint.reads": [
        ("joins_nothing", {RUN_GOES_ON: "if False and"}, r"right elements, in 3 reads where 2 are enough"),
        ("counts_from_the_parameter", {FIRST: "start"}, r"from the beginning of the parameter"),
        ("counts_from_the_slice", {FIRST: "start - piece.start"}, r"Other slices may lie before it"),
        ("always_from_the_slices_start", {FIRST: "before"}, r"from its middle on"),
        ("adds_the_place_in_the_parameter", {FIRST: "before + start"}, r"is to be subtracted"),
        ("only_from_others", {"numel <= 0": "numel <= 0 or src == rank"}, r"nothing is in memory"),
        ("file_by_file", {"return found": "return sorted(found, key=lambda read: read[0])"},
         r"in the order of the new rank's slices"),
        ("in_bytes", {"return found": "return [(src, 4 * first, 4 * numel) for src, first, numel in found]"},
         r"Count elements"),
        ("the_whole_files",
         {"return found": "return [(src, 0, old.loads[src]) for src in sorted({read[0] for read in found})]"},
         r"192 elements in all, and the rank is to own 128"),
        ("all_reads_of_the_first_file", {"return found": "return [(0, *read[1:]) for read in found]"},
         r"number 0 of parameter 0; the rank.s is number 192"),
        ("without_the_rank", {"return found": "return [read[1:] for read in found]"},
         r"must return a list of \(old rank, first element"),
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
        ("only_rank_0", {"in shards:": "in shards[:1]:"}, r"parameter 1 is missing"),
        ("keeps_the_shards_memory",
         {FILL: FILL + "                if piece.numel == partition.numels[piece.param]:\n"
                       "                    of_param[key] = state[key].view(shapes[piece.param])\n"},
         r"lies in the memory of a shard"),
    ],
    "checkpoint.save": [
        ("writes_in_place", {WRITE: "        disk.write(name, shard)\n", RENAME: ""},
         r"takes the half of shard 0 for the whole"),
        ("removes_first", {REMOVE: "", "    for rank": REMOVE + "\n    for rank"},
         r"killed in write\(.* finds no complete save"),
        ("never_removes", {REMOVE: ""}, r"save number 10 there still are \['save-9/shard-0-of-1'\]"),
        ("replaces_the_old_files", {REMOVE: "", "{number}": "{number - 1}"},
         r"after save number 10 the file 'save-10/shard-0-of-1' is missing"),
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
        ("its_own_newest", {"return max(common, default=None)": "return max(intact, default=None)"},
         r"newest save of its own disk. To go on from different saves"),
        ("the_newest_of_all", {"set.intersection": "set.union"},
         r"newest that any rank has. A save is whole only if every rank's part is"),
        ("the_oldest_of_the_newest",
         {"return max(common, default=None)": "return min(int(saves.max()) for saves in of_ranks)"},
         r"oldest of the ranks' newest saves"),
        ("the_oldest", {"return max(": "return min("}, r"oldest save that all ranks have"),
        ("only_if_it_is_everybodys_newest",
         {"return max(common, default=None)":
              "newest = {int(saves.max()) for saves in of_ranks}\n"
              "    return newest.pop() if len(newest) == 1 else None"},
         r"where the newest is not, an older one will do"),
        ("fills_up_with_a_save", {"[0] *": "[1] *"},
         r"should be None. Some rank lacks that save. Is it the number"),
        ("zero_for_none", {"default=None": "default=0"}, r"it should be None. No rank has that save"),
        ("lists_of_any_length", {" + [0] * (longest - len(intact))": ""},
         r"wait for each other.* must have one shape on all"),
        ("returns_as_soon_as_it_knows",
         {"    lengths": "    if not intact:\n        return None\n    lengths"},
         r"wait for each other.*A rank without a save makes every call, too"),
        ("a_set", {"return max(common, default=None)": "return common"},
         r"must return the number of a save, or None"),
    ],
}  # fmt: skip
