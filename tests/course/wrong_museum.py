"""Chapter 15: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

MEAN = "        mean /= comm.world_size\n"
SENT = "        comm.broadcast(param, owners[number]).wait()"

CHANGED = {
    "museum.causes": [
        ("plain_comes_last", {"    if agrees(plain):\n        return [\"healthy\"]\n": ""},
         r"Look at the plain loop first"),
        ("first_cause_only", {"return found or": "return found[:1] or"}, r"Several causes may give the same"),
        ("says_nothing", {" or [\"unknown\"]": ""}, r"Where nothing agrees, say so"),
        ("compares_means", {"((observed - values).abs() <= bound).all()":
          "(observed - values).mean().abs() <= bound"},
         r"whatever the sum is"),
        ("nan_agrees", {"bool(((observed - values).abs() <= bound).all())":
                        "not bool(((observed - values).abs() > bound).any())"},
         r"within no bound of anything"),
    ],
    "museum.healthy_step": [
        ("sums", {MEAN: ""}, r"a step with the sum of the gradients"),
        ("keeps_it", {SENT: "        pass"}, r"it did not move there"),
        ("all_keep_momenta", {"if owners[number] == comm.rank:": "if True:"},
         r"Only the owner of a parameter keeps"),
        ("no_momentum", {".mul_(momentum)": ".zero_()"}, r"the doctor says: plain: departs"),
        ("changes_before_it_knows",
         {"            continue\n": "            param.mul_(0.5)\n            continue\n"},
         r"no rank has a gradient of it, so it stays"),
    ],
}  # fmt: skip
