"""My own ZeRO."""


def assign_owners(numels, world_size):
    """The owner of each parameter: the largest first, each to the rank that has the fewest elements."""
    owners = [0] * len(numels)
    loads = [0] * world_size
    for number in sorted(range(len(numels)), key=lambda number: -numels[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += numels[number]
    return owners
