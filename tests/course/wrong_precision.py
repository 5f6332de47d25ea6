"""Chapter 12: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

POWER = "2.0 ** (exponent - 1)"
GRADIENT = "None if param.grad is None else param.grad.to(master.dtype)"
COPY = "    with torch.no_grad():\n        param.copy_(master)"

CHANGED = {
    "precision.lost_below": [
        ("the_whole_gap", {".eps / 2": ".eps"}, r"That is the whole gap"),
        ("in_proportion", {POWER: "abs(weight)"}, r"does not grow with each weight"),
        ("that_of_1", {POWER: "1"}, r"gap at 1\. Other weights"),
        ("the_next_power", {POWER: "2.0 ** math.ceil(math.log2(abs(weight)))"},
         r"power at or below the weight"),
        ("with_its_sign", {POWER: f"math.copysign({POWER}, weight)"}, r"below zero has the same gaps"),
        ("always_bfloat16", {"finfo(dtype)": "finfo(torch.bfloat16)"}, r"These are bfloat16's gaps"),
        ("a_pair", {"return ": "return weight, "}, r"must return one number"),
    ],
    "precision.master_step": [
        ("gives_no_gradient", {f"    master.grad = {GRADIENT}\n": ""}, r"the master has not changed"),
        ("makes_it_from_the_parameter",
         {"    master.grad": "    master.data.copy_(param.data)\n    master.grad"},
         r"made from the parameter again"),
        ("rounds_the_master", {COPY: COPY + "\n        master.copy_(param)"},
         r"the master has only values of bfloat16"),
        ("writes_back_first", {COPY: "", "    master.grad": COPY + "\n    master.grad"},
         r"has not changed in this step: write the master's new"),
        ("makes_the_model_float32", {COPY: "    param.data = master.detach().clone()"},
         r"the parameter is torch\.float32"),
        ("adds_gradients_up",
         {GRADIENT: "param.grad.float() + (0.0 if master.grad is None else master.grad)"},
         r"earlier steps do not add up"),
        ("keeps_the_old_gradient",
         {"master.grad = None if param.grad is None else":
              "if param.grad is not None:\n        master.grad ="},
         r"has no update in this step"),
    ],
}  # fmt: skip
