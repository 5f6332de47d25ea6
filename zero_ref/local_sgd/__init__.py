"""Local SGD: ranks average their parameters after some steps, instead of their gradients in every step.

- `averaging`: at which steps they do, and over whom: integers only;
- `averagers`: that on real ranks;
- `optimizer`: the optimizer, and the hook for DDP.
"""
