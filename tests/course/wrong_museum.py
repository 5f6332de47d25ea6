"""Chapter 15: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

MEAN = "        mean /= comm.world_size\n"
SENT = "        comm.broadcast(param, owners[number]).wait()"

CHECKED = "    if not torch.allclose(gradients.T @ found, observed, atol=1e-3):\n        return None\n"

CHANGED = {
    "museum.weights": [
        ("never_none", {CHECKED: ""}, r"compare what yours give in every element"),
        ("compares_loosely", {"atol=1e-3": "atol=10"}, r"No weights give it"),
        ("only_positive", {"return found.tolist()": "return found.clamp(min=0).tolist()"},
         r"A weight may be negative"),
        ("divides", {"torch.linalg.lstsq(gradients.T, observed[:, None]).solution[:, 0]":
                     "torch.stack([observed[0] / g[0] for g in gradients]).nan_to_num(0.0)",
                     CHECKED: ""}, r"in all elements at once"),
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
