"""The work that ranks do together: `stairs/owners.py` made complete. Read `step`, then `shard/shard.py`.

- `zero_redundancy_optimizer`: the class and its step;
- `registered`: the options and groups that the user has given;
- `plans`: the plans made of it, also anew while a run goes on;
- `accord`: what ranks must have in common, and who has failed;
- `start_values`: whether ranks start from equal parameters;
- `warned`: warnings that name the user's line;
- `closure`: a closure inside the step;
- `scaled`: a step by FairScale's scaler, which adds up over ranks;
- `during_backward`: a step that a hook of the program's own makes;
- `join`: uneven inputs;
- `forwarded`: attributes of the wrapped class, and its `train` and `eval`, called on all ranks;
- `zero`: the part of the optimizer that its modules use;
- `own_saves`: what one sharded save or load leaves the next.
"""
