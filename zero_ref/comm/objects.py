"""Bytes, texts and JSON between ranks, sent as uint8 tensors on the device of short messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zero_ref.comm.collectives import Collectives


def gather_bytes(comm: Collectives, content: bytes, op: str = "all_gather") -> list[bytearray]:
    """Gather the `content` of each rank, in rank order; it has the same number of bytes on all ranks.

    Collective: all ranks of the group.
    Cost: one all-gather of the content.
    """
    return [_content_of(other) for other in comm.all_gather(_tensor_of(content, comm), op)]


def gather_texts(comm: Collectives, text: str) -> list[str]:
    """Gather the `text` of each rank, in rank order.

    Collective: all ranks of the group.
    Cost: one all-gather of 8 bytes; if any text is not empty, one more of the texts.
    """
    mine = text.encode()
    lengths = [int.from_bytes(other, "big") for other in gather_bytes(comm, len(mine).to_bytes(8, "big"))]
    if not any(lengths):
        return [""] * comm.world_size
    # An all-gather takes tensors of one size: pad to the longest text, and cut off the padding afterwards.
    texts = gather_bytes(comm, mine.ljust(max(lengths)))
    return [other[:length].decode() for other, length in zip(texts, lengths, strict=True)]


def broadcast_json(comm: Collectives, value: Any, src: int) -> Any:
    """Send the `value` of rank `src` to all ranks, as JSON; 0-dimensional tensors become numbers.

    Collective: all ranks of the group.
    Cost: two broadcasts, of 8 bytes and of the text.
    """
    text = json.dumps(value, default=torch.Tensor.item).encode() if comm.rank == src else b""
    # The length first, so that the other ranks can allocate memory for the text.
    length = torch.tensor([len(text)], device=comm.control_device)
    comm.broadcast(length, src).wait()
    tensor = _tensor_of(text.ljust(int(length.item())), comm)
    comm.broadcast(tensor, src).wait()
    return json.loads(_content_of(tensor))


def exchange_json(comm: Collectives, values: Mapping[int, Any], sources: Iterable[int]) -> list[Any]:
    """Send each rank in `values` its value, as JSON; return the values from `sources`, in their order.

    Collective: each destination has this rank among its sources, and each source has a value for this rank.
    Cost: between two ranks two messages, of 8 bytes and of the text.
    """
    texts = [(peer, _tensor_of(json.dumps(value).encode(), comm)) for peer, value in values.items()]
    # The lengths first, so that each receiver can allocate memory for the text.
    lengths = [(peer, torch.tensor([text.numel()], device=comm.control_device)) for peer, text in texts]
    their_lengths = [(peer, torch.tensor([0], device=comm.control_device)) for peer in sources]
    comm.exchange(lengths, their_lengths).wait()
    # Tensors of zeros, for the texts to be received into.
    theirs = [(peer, _tensor_of(bytes(int(length.item())), comm)) for peer, length in their_lengths]
    comm.exchange(texts, theirs).wait()
    return [json.loads(_content_of(text)) for _, text in theirs]


def _tensor_of(content: bytes, comm: Collectives) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(comm.control_device)


def _content_of(tensor: torch.Tensor) -> bytearray:
    content = bytearray(tensor.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(tensor)
    return content
