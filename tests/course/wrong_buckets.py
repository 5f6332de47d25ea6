"""Chapter 5: answers that a reader may give, as changes of the solution, and what the check must say."""

from __future__ import annotations

MOVE = "param.data = window"
PIECE = "flat[offset : offset + param.numel()]"

CHANGED = {
    "buckets.flatten": [
        ("copies_and_does_not_move", {MOVE: ""}, "memory of its own.*Assign a window"),
        ("makes_new_parameters",
         {"for param in params:": "for number, param in enumerate(params):",
          MOVE: "params[number] = nn.Parameter(window)"},
         "parameter 0 was replaced in the list"),
        ("last_parameter_first", {"in params:": "in params[::-1]:"},
         "parameter 0 begins at element 14 .* belongs at 0"),
        ("loses_strides",
         {"flat.as_strided(param.size(), param.stride(), offset)": PIECE + ".view(param.shape)"},
         r"parameter 1 has strides \(5, 1\) and had \(1, 2\)"),
        ("in_autograds_sight", {"@torch.no_grad()\n": "", MOVE: MOVE + ".detach()"},
         r"autograd follows.*under torch\.no_grad\(\)"),
        ("flat_parameters", {MOVE: "param.data = " + PIECE},
         r"parameter 0 has shape \(12,\) and had \(4, 3\)"),
        ("all_in_float32", {", dtype=params[0].dtype": ""}, "float32; the parameters are of torch.float64"),
        ("pads", {"return flat": "return torch.cat([flat, flat.new_zeros(-flat.numel() % 16)])"},
         r"returned 32 elements; the parameters have 26\. The flat tensor holds each"),
        ("a_matrix", {"return flat": "return flat[None]"},
         r"shapes \(4, 3\), .* returned a tensor of shape \(1, 26\)"),
        ("every_offset_0", {"offset)": "0)"}, "other values than before.*each to its own place"),
        ("thaws", {MOVE: MOVE + "\n        param.requires_grad_(True)"},
         "parameter 2 has requires_grad=True and had False"),
    ],
    "buckets.calls": [
        ("elements", {"4 * numel": "numel"}, "A message has bytes: a float32 takes 4"),
        ("in_the_models_order",
         {"return pairs": "return pairs if flat else [(owner, 4 * piece.numel) "
          "for pieces in partition.pieces_of_param for piece, owner in pieces if trainable[piece.param]]"},
         "owner by owner.* in the order of the model"),
        ("one_rank_sends", {"world_size == 1": "world_size == 0"}, "One rank has nobody to send to"),
    ],
}  # fmt: skip
