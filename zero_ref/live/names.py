"""Names as a label has room for them: of parameters, and of a few ranks of many."""

from __future__ import annotations

from collections.abc import Sequence

from zero_ref.plan.partition import Partition


def short_names(name: str) -> list[str]:
    """Ever shorter forms of a parameter's name, with its layer's number as long as that fits.

    >>> short_names("h.0.attn.c_proj.weight")
    ['h.0.attn.c_proj.weight', 'h.0.attn.c_proj', '0.attn.c_proj', '0.c_proj', 'c_proj']
    """
    parts = name.removesuffix(".weight").split(".")
    last = len(parts) - 2 if parts[-1] == "bias" and len(parts) > 1 else len(parts) - 1
    layer = next((place for place in range(last) if parts[place].isdecimal()), -1)
    numbered = [parts[i:] if i <= layer or layer < 0 else [parts[layer], *parts[i:]] for i in range(last + 1)]
    return list(dict.fromkeys([name, *map(".".join, numbered), ".".join(parts[last:])]))


def names_of(partition: Partition, names: Sequence[str] | None) -> Sequence[str]:
    """The parameters' names, checked; their numbers if there are none."""
    if names is None:
        return [str(param) for param in range(len(partition.numels))]
    if len(names) != len(partition.numels):
        raise ValueError(f"{len(names)} names for {len(partition.numels)} parameters: give one for each.")
    return names


def rank_ticks(world_size: int) -> list[int]:
    """A few ranks to name on an axis: all of up to 16, otherwise the first, the last and some between."""
    if world_size <= 16:
        return list(range(world_size))
    step = -(-world_size // 4)
    return [*range(0, world_size - step // 2, step), world_size - 1]
