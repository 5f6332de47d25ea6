"""Chapter 13: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

APART = """        pieces = [
            stepped(piece(values, *cut), [piece(one, *cut) for one in gradients])
            for cut in ((0, 448), (448, 1920))
        ]
"""
TOGETHER = """        pieces = [nn.Parameter(one.clone()) for one in values.flatten().split([448, 1472])]
        optimizer = optimizer_class(pieces, **options)
        for gradient in gradients:
            for param, grad in zip(pieces, gradient.flatten().split([448, 1472])):
                param.grad = grad.clone()
            optimizer.step()
        pieces = [param.detach() for param in pieces]
"""
BOTH = "(torch.cat(pieces), stepped(values, gradients))"
BACK = "return exchanged(updated, like=rows)"
REDUCE = "    comm.all_reduce(sums).wait()\n"

CHANGED = {
    "matrices.may_be_cut": [
        ("one_step", {"randn(4": "randn(2"}, r"WarmsUp may be cut\. .*make several steps"),
        ("one_dimension", {"randn(4, 40, 48": "randn(4, 1920"},
         r"RowsAndColumns may be cut\. .*Step a matrix"),
        ("wide_tolerance", {"equal" + BOTH: f"allclose(*{BOTH}, atol=1e-3)"},
         r"LAMB may be cut\. .*allow for none"),
        ("between_rows", {"[begin:end]": "[begin:end].view(-1, 48)", "448": "576"},
         r"NormalizedRows may be cut\. .*inside a row"),
        ("the_same_gradient_everywhere",
         {"    def stepped": "    gradients = [torch.ones(40, 48)] * 3\n\n    def stepped"},
         r"RowsAndColumns.*not the same everywhere"),
        ("one_optimizer_for_both", {APART: TOGETHER}, r"ClipsTogether.*each piece one of its own"),
        ("other_gradients", {"gradient.clone()": "torch.randn_like(gradient)"},
         r"AdamW may not be cut\. .*same values and gradients"),
        ("lets_it_raise", {"except ValueError": "except KeyError"},
         r"^may_be_cut\(Muon, \.\.\.\) raised ValueError: Muon only supports 2D.*catch the error"),
        ("always", {"return False": "return True", "return torch.equal": "return True or "},
         r"Muon may be cut\. It refuses pieces"),
        ("the_difference", {"return torch.equal": "return 0.0 * torch.equal"},
         r"returned 0\.0\. It must return True or False"),
    ],
    "matrices.rows_and_columns": [
        ("its_own_columns", {REDUCE: ""}, r"are those of this rank's rows alone"),
        ("mean_of_means",
         {"squares.sum(dim=0), number_of_rows": "squares.sum(dim=0) / max(1, len(rows)), number_of_rows",
          "sums[:-1] / sums[-1]": "sums[:-1] / comm.world_size"},
         r"averages the ranks' means. Ranks have different numbers of rows"),
        ("sums_of_columns", {"sums[:-1] / sums[-1]": "sums[:-1]"},
         r"not divided by the number of rows of all ranks"),
        ("divides_by_its_own_rows", {"/ sums[-1]": "/ max(1, len(rows))"},
         r"not divided by the number of rows of all ranks"),
        ("one_root", {".sqrt().sqrt()": ".sqrt()"}, r"fourth root of the product: take the root twice"),
        ("columns_alone", {"of_columns * of_rows": "of_columns"}, r"Divide by the means of the rows, too"),
        ("sends_the_gradients",
         {"    squares": "    comm.all_reduce(torch.zeros(40)).wait()\n    squares"},
         r"sends \d+ numbers; 4 are enough.*stay where they are"),
        ("ranks_with_nothing_return",
         {"    squares": "    if not len(rows):\n        return rows\n    squares"},
         r"wait for each other.*also a rank that has no row"),
        ("returns_the_means", {"return rows / (of_columns * of_rows).sqrt().sqrt()": "return of_columns"},
         r"must return a tensor of the shape of this rank's rows"),
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
        ("keeps_its_old_rows",
         {BACK:
              "found = exchanged(updated, like=rows)\n    found[me] = rows[me]\n    return found"},
         r"They are as before"),
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
