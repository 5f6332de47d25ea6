"""Plans in integers, beyond `assign_owners` of `stairs/owners.py`: owners, offsets, calls. No torch.

- `partition`: who owns what;
- `rules`: the rules for it; add yours there;
- `choice`: their names, and what a user may pass as `partition=`;
- `layout`: where each piece lies in flat buckets;
- `gradients`: which gradients are reduced together without DDP;
- `moves`: what changes hands when owners change;
- `parcels`: which small tensors travel together;
- `boxes`: a range of memory as boxes of a tensor;
- `calls`: a call to the other ranks, as planned and as recorded.
"""
