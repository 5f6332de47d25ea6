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
OPERATIONS = "4 * m**2 * n + 2 * m**3"
COSTLIEST_FIRST = "sorted(range(len(matrices)), key=lambda i: -costs[i])"

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
    "matrices.operations": [
        ("not_transposed", {"sorted((rows, columns))": "rows, columns"},
         r"\(32, 4, 3\) returned .*more rows than columns"),
        ("without_the_square", {" + 2 * m**3": ""}, r"A with itself is missing"),
        ("one_product_short", {"4 * m**2": "2 * m**2"}, r"One product is missing"),
        ("multiplications_alone", {OPERATIONS: "2 * m**2 * n + m**3"}, r"multiplications alone"),
        ("one_iteration", {"iterations * ": ""}, r"\(4, 32, 3\) returned .*That is one iteration"),
        ("the_elements", {OPERATIONS: "m * n"}, r"\(2, 3, 1\) returned 6, and torch\.optim\.Muon makes 64"),
        ("a_float", {"return ": "return 1.0 * "}, r"returned 64\.0\. It must return a whole number"),
    ],
    "matrices.by_cost": [
        ("by_elements", {OPERATIONS: "m * n"}, r"This balances the elements"),
        ("in_registration_order", {COSTLIEST_FIRST: "range(len(matrices))"},
         r"in the order given.*costliest first"),
        ("dealt_in_turn", {"return owners": "return [i % world_size for i in range(len(matrices))]"},
         r"balances the number of matrices"),
        ("positions_lost",
         {"[0] * len(matrices)": "[]",
          "owners[i] = loads.index(min(loads))": "owners.append(loads.index(min(loads)))",
          "[owners[i]]": "[owners[-1]]"},
         r"right owners in the wrong places"),
        ("cheapest_first", {"-costs[i]": "costs[i]"},
         r"the fullest rank has .*costliest matrix that is left"),
        ("matrices_of_each_rank",
         {"return owners": "return [[i for i, o in enumerate(owners) if o == r] for r in range(world_size)]"},
         r"returned \[\[.*for each of the 5 matrices"),
    ],
}  # fmt: skip
