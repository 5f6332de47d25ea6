"""Chapter 5: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_ref.plan.partition import Partition

# ------------------------------------------------------------------------------------------- flatten


def placed(
    params: list[nn.Parameter], fill: Callable[[torch.Tensor, nn.Parameter], Any], order: int = 1
) -> torch.Tensor:
    """Right but for what `fill` does with a window and its parameter, and for the order."""
    flat = torch.empty(sum(param.numel() for param in params), dtype=params[0].dtype)
    offset = 0
    for param in params[::order]:
        with torch.no_grad():
            fill(flat.as_strided(param.size(), param.stride(), offset), param)
        offset += param.numel()
    return flat


def move(window: torch.Tensor, param: nn.Parameter) -> None:
    window.copy_(param)
    param.data = window


def only_concatenates(params: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in params])


def forgets_to_copy(params: list[nn.Parameter]) -> torch.Tensor:
    flat = torch.zeros(sum(param.numel() for param in params), dtype=params[0].dtype)
    offset = 0
    for param in params:
        param.data = flat.as_strided(param.size(), param.stride(), offset)
        offset += param.numel()
    return flat


def copies_and_does_not_move(params: list[nn.Parameter]) -> torch.Tensor:
    return placed(params, lambda window, param: window.copy_(param))


def makes_new_parameters(params: list[nn.Parameter]) -> torch.Tensor:
    flat = only_concatenates(params)
    pieces = flat.split([param.numel() for param in params])
    params[:] = [nn.Parameter(piece.view(param.shape)) for piece, param in zip(pieces, params)]
    return flat


def last_parameter_first(params: list[nn.Parameter]) -> torch.Tensor:
    return placed(params, move, order=-1)


def loses_strides(params: list[nn.Parameter]) -> torch.Tensor:
    flat = only_concatenates(params)
    for piece, param in zip(flat.split([param.numel() for param in params]), params):
        param.data = piece.view(param.shape)
    return flat


def in_autograds_sight(params: list[nn.Parameter]) -> torch.Tensor:
    flat = torch.cat([param.as_strided((param.numel(),), (1,)) for param in params])
    offset = 0
    for param in params:
        param.data = flat.detach().as_strided(param.size(), param.stride(), offset)
        offset += param.numel()
    return flat


def flat_parameters(params: list[nn.Parameter]) -> torch.Tensor:
    flat = only_concatenates(params)
    for piece, param in zip(flat.split([param.numel() for param in params]), params):
        param.data = piece
    return flat


def all_in_float32(params: list[nn.Parameter]) -> torch.Tensor:
    flat = torch.empty(sum(param.numel() for param in params))
    offset = 0
    for param in params:
        window = flat.as_strided(param.size(), param.stride(), offset)
        window.copy_(param.detach())
        param.data = window
        offset += param.numel()
    return flat


def pads(params: list[nn.Parameter]) -> torch.Tensor:
    flat = placed(params, move)
    return torch.cat([flat, flat.new_zeros(-flat.numel() % 16)])


def a_matrix(params: list[nn.Parameter]) -> torch.Tensor:
    return placed(params, move)[None]


def every_offset_0(params: list[nn.Parameter]) -> torch.Tensor:
    flat = torch.empty(sum(param.numel() for param in params), dtype=params[0].dtype)
    for param in params:
        with torch.no_grad():
            move(flat.as_strided(param.size(), param.stride(), 0), param)
    return flat


def returns_another_copy(params: list[nn.Parameter]) -> torch.Tensor:
    return placed(params, move).clone()


def thaws(params: list[nn.Parameter]) -> torch.Tensor:
    flat = placed(params, move)
    for param in params:
        param.requires_grad_(True)
    return flat


# ------------------------------------------------------------------------------------- predict the calls


def sent(
    partition: Partition,
    trainable: list[bool],
    flat: bool,
    itemsize: int = 4,
    round_to: int = 1,
    empty_too: bool = False,
) -> list[tuple[int, int]]:
    pairs = []
    for rank, slices in enumerate(partition.slices_of_rank):
        numels = [piece.numel for piece in slices if trainable[piece.param]]
        for numel in [sum(numels)] if flat else numels:
            if numel or empty_too:
                pairs.append((rank, -(-numel // round_to) * round_to * itemsize))
    return pairs if partition.world_size > 1 else []


def frozen_ones_too(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return sent(partition, [True] * len(trainable), flat)


def elements(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return sent(partition, trainable, flat, itemsize=1)


def padding_too(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return sent(partition, trainable, flat, round_to=16 if flat else 1)


def empty_messages(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return sent(partition, trainable, flat, empty_too=True)


def always_one_by_one(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return sent(partition, trainable, flat=False)


def always_flat(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return sent(partition, trainable, flat=True)


def in_the_models_order(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    if flat:
        return sent(partition, trainable, flat)
    return [
        (owner, 4 * piece.numel)
        for pieces in partition.pieces_of_param
        for piece, owner in pieces
        if piece.numel and trainable[piece.param] and partition.world_size > 1
    ]


def largest_first(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return sorted(sent(partition, trainable, flat), key=lambda pair: -pair[1])


def one_rank_sends(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    if partition.world_size > 1:
        return sent(partition, trainable, flat)
    return [(0, 4 * sum(partition.numels))] if flat else [(0, 4 * numel) for numel in partition.numels]


def one_message_for_all(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    pairs = sent(partition, trainable, flat)
    return [(0, sum(nbytes for _, nbytes in pairs))] if flat else pairs


def only_bytes(partition: Partition, trainable: list[bool], flat: bool) -> Any:
    return [nbytes for _, nbytes in sent(partition, trainable, flat)]


# ----------------------------------------------------------------------------------------- worth copying


def all_of_them(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[int]:
    return list(range(len(nbytes)))


def none_of_them(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[int]:
    return []


def copied_once(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[int]:
    return [i for i, n in enumerate(nbytes) if n / bytes_per_us < fixed_us]


def the_buffer_is_free(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[int]:
    return [i for i, n in enumerate(nbytes) if 2 * n / bytes_per_us < fixed_us]


def the_large_ones(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[int]:
    return [i for i, n in enumerate(nbytes) if 2 * n / bytes_per_us >= fixed_us]


def never_fewer_than_three(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[int]:
    small = the_buffer_is_free(nbytes, fixed_us, bytes_per_us)
    return small if len(small) > 3 else []


def sizes_for_numbers(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[int]:
    return [n for n in nbytes if 2 * n / bytes_per_us < fixed_us]


def flags(nbytes: list[int], fixed_us: int, bytes_per_us: int) -> list[bool]:
    return [2 * n / bytes_per_us < fixed_us for n in nbytes]


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("buckets.flatten", only_concatenates, r"parameter 0 has memory of its own.*torch\.cat only copies"),
    ("buckets.flatten", forgets_to_copy, "parameter 0 has other values than before. Copy them"),
    ("buckets.flatten", copies_and_does_not_move, "memory of its own.*Assign a window"),
    ("buckets.flatten", makes_new_parameters, "parameter 0 was replaced in the list"),
    ("buckets.flatten", last_parameter_first, "parameter 0 begins at element 14 .* belongs at 0"),
    ("buckets.flatten", loses_strides, r"parameter 1 has strides \(5, 1\) and had \(1, 2\)"),
    ("buckets.flatten", in_autograds_sight, r"autograd follows.*under torch\.no_grad\(\)"),
    ("buckets.flatten", flat_parameters, r"parameter 0 has shape \(12,\) and had \(4, 3\)"),
    ("buckets.flatten", all_in_float32, "float32; the parameters are of torch.float64"),
    ("buckets.flatten", pads, r"returned 32 elements; the parameters have 26\. The flat tensor holds each"),
    ("buckets.flatten", a_matrix, r"shapes \(4, 3\), .* returned a tensor of shape \(1, 26\)"),
    ("buckets.flatten", every_offset_0, "other values than before.*each to its own place"),
    ("buckets.flatten", returns_another_copy, "memory of its own"),
    ("buckets.flatten", thaws, "parameter 2 has requires_grad=True and had False"),
    ("buckets.calls", frozen_ones_too, r"\[4 \(frozen\), 8\].*frozen parameter does not change"),
    ("buckets.calls", elements, "A message has bytes: a float32 takes 4"),
    ("buckets.calls", padding_too, "flat=True: .* Padding is not sent"),
    ("buckets.calls", empty_messages, "A message without bytes is not sent"),
    ("buckets.calls", always_one_by_one, "flat=True: .*lies together, and goes out as one message"),
    ("buckets.calls", always_flat, "flat=False: .*each slice is a message of its own"),
    ("buckets.calls", in_the_models_order, "owner by owner.* in the order of the model"),
    ("buckets.calls", largest_first, r"rank 0 sends first, then rank 1"),
    ("buckets.calls", one_rank_sends, "One rank has nobody to send to"),
    ("buckets.calls", one_message_for_all, r"sends \[\(0, 56\), \(1, 48\)\].* 1 messages instead of 2"),
    ("buckets.calls", only_bytes, r"returned \[48, 8, 16, 32\]\. It must return a list of pairs"),
    ("buckets.worth_copying", all_of_them, "Copying 2,000,000 bytes into the buffer .* takes 800 us"),
    ("buckets.worth_copying", none_of_them, "Parameter 0 could go with the others.* takes 0.4 us"),
    ("buckets.worth_copying", copied_once, r"Copying 400,000 bytes into .* and out of it .* takes 160 us"),
    ("buckets.worth_copying", the_buffer_is_free, "the buffer is a message too"),
    ("buckets.worth_copying", the_large_ones, "Copying 2,000,000 bytes into the buffer"),
    ("buckets.worth_copying", never_fewer_than_three, "Parameter 0 could go with the others"),
    ("buckets.worth_copying", sizes_for_numbers, "1000 is not the number of a parameter. There are 5"),
    ("buckets.worth_copying", flags, "True is not the number of a parameter"),
]
