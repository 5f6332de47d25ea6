"""Chapter 13: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

BOTH = "(torch.cat(pieces), stepped(values, gradients))"
BACK = "return exchanged(updated, like=rows)"

CHANGED = {
    "matrices.may_be_cut": [
        ("wide_tolerance", {"equal" + BOTH: f"allclose(*{BOTH}, atol=1e-3)"},
         r"LAMB may be cut\. .*allow for none"),
        ("lets_it_raise", {"except ValueError": "except KeyError"},
         r"^may_be_cut\(Muon, \.\.\.\) raised ValueError: Muon only supports 2D.*catch the error"),
        ("the_difference", {"return torch.equal": "return 0.0 * torch.equal"},
         r"returned 0\.0\. It must return True or False"),
    ],
    "matrices.update_whole": [
        ("its_own_rows_alone",
         {BACK: "return [update(one) for one in rows]",
          "    updated = update(torch.cat(parts)).chunk(comm.world_size)\n": ""},
         r"update is called 2 times. Rank r updates matrix r, and no other"),
        ("its_own_rows_of_it", {"update(torch.cat(parts))": "update(rows[me]).repeat(comm.world_size, 1)"},
         r"what is updated is not matrix 0.*put all ranks' rows of it together"),
        ("its_own_rows_first", {"torch.cat(parts)": "torch.cat([parts[me], *(parts[r] for r in others)])"},
         r"what is updated is not matrix 1. Its rows are in another order"),
        ("sends_nothing_back", {BACK: "return rows"},
         r"They are as before: the owner has to send them back"),
        ("shares_turned_round", {BACK: "return exchanged(updated[::-1], like=rows)"},
         r"They are those of rank 1"),
        ("gathers_everything",
         {"parts = exchanged(rows, like=[rows[me]] * comm.world_size)":
              "parts = [comm.all_gather(one.contiguous()) for one in rows][me]"},
         r"bytes are sent; \d+ are enough.* An all-gather would bring every matrix to every rank"),
        ("receives_nothing", {"[(rank, received[rank]) for rank in others]": "[]"},
         r"what is updated is not matrix 0. It has other rows"),
        ("the_matrices", {BACK: "return [torch.cat(parts)] * comm.world_size"},
         r"must return a list: for each matrix this rank's rows"),
    ],
}  # fmt: skip
