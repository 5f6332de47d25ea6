"""Chapter 11: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

REDUCE_NORMS = "    comm.all_reduce(norms).wait()\n"
NORM = "norms.norm(norm_type).item()"
REDUCE_SPOILED = "    comm.all_reduce(spoiled).wait()\n"
NONE_SPOILED = "spoiled.item() == 0"

CHANGED = {
    "clipping.global_norm": [
        ("of_this_rank_alone", {REDUCE_NORMS: ""}, r"What do the others own\?"),
        ("takes_no_root", {NORM: "(norms**norm_type).sum().item()"}, r"p-th root"),
        ("averages_the_norms", {NORM: "((norms**norm_type).mean() ** (1 / norm_type)).item()"},
         r"divided by the number of ranks"),
        ("forgets_infinity", {NORM: f"norms.sum().item() if norm_type == math.inf else {NORM}"},
         r"norm_type=inf .* sum of norms"),
        ("powers_of_infinity", {NORM: f"math.nan if norm_type == math.inf else {NORM}"},
         r"the largest element counts"),
        ("powers_and_a_root_at_infinity", {NORM: "((norms**norm_type).sum() ** (1 / norm_type)).item()"},
         r"x\*\*inf is 0, 1 or infinite"),
        ("always_the_2_norm", {"(norm_type)": "(2.0)"}, r"2-norm, whatever"),
        ("always_the_square_root",
         {"    norms =": "    norm_type = 2.0 if norm_type == math.inf else norm_type\n    norms =",
          NORM: "(norms**norm_type).sum().sqrt().item()"},
         r"must be the p-th one, too"),
        ("gathers_the_gradients",
         {REDUCE_NORMS: "    mine = torch.cat([*gradients, torch.zeros(1000)])[:1000]\n"
                        "    norms = torch.cat(comm.all_gather(mine))\n"},
         r"Gradients stay where they are"),
        ("a_norm_for_each_rank", {"zeros(comm.world_size)": "zeros(comm.world_size + 1)", NORM: "norms"},
         r"must return one number"),
        ("clips_on_the_way",
         {"    norms =": "    for gradient in gradients:\n        gradient.mul_(0.5)\n    norms =",
          NORM: "norms.sum().item()"},
         r"only to look at them"),
    ],
    "clipping.may_step": [
        ("looks_at_its_own", {REDUCE_SPOILED: ""}, r"some step and some do not"),
        ("misses_nan", {"all(gradient.isfinite().all()": "not any(gradient.isinf().any()"},
         r"A NaN is not infinite"),
        ("steps_unless_all_are_spoiled", {NONE_SPOILED: "spoiled.item() < comm.world_size"},
         r"on any rank, is enough"),
        ("adds_the_elements",
         {"0.0 if finite else 1.0": "sum((gradient.sum().item() for gradient in gradients), 0.0)",
          NONE_SPOILED: "math.isfinite(spoiled.item())"},
         r"may overflow"),
    ],
}  # fmt: skip
