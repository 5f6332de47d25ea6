"""The part of one rank: its parameters and slices, their gradients, and the optimizer that steps them.

- `groups`: what parameter groups say;
- `built`: the parameters, their partition and the messages, as one frozen value;
- `shard`: what a rank owns;
- `stepper`: three ways to step it: in place, through copies, merged;
- `owned`: its slices;
- `rounding`: stochastic rounding, for optimizers that keep no masters;
- `merged`: small neighbours stepped as one tensor;
- `local_class`: whether its class is torch's, and its state that of parameters;
- `offload`: the shard on the CPU or in files;
- `foreign`: the step of classes that are not torch's;
- `buckets`: flat tensors whose windows are the parameters, and their broadcasts;
- `arriving`: new parameters that arrive during the next forward;
- `gradients`: where gradients are, and what may be done with them;
- `gradient_versions`: whether gradients were changed or added to;
- `local_state`: the state of a parameter, for a program that asks for it;
- `subclasses`: tensor subclasses and lists of a state, taken apart to be sent;
- `checks`: whether an optimizer and its parameters can be sharded;
- `digests`: whether values are equal on all ranks.
"""
