"""This optimizer beside its peers and beside what the machine can do: what `python -m benchmarks` runs.

`rounds` says how contenders take turns, `contenders` who takes part with which models, `training` and `state`
what is timed, `results` what comes out, `comparisons` what follows from it, and `tables` and `plots` show it.
`gpu` has what only a GPU can tell, `counts` compares numbers of parameters with published ones, and
`dialects` counts what DeepSpeed's stages send.
"""
