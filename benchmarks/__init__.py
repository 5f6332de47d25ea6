"""This optimizer beside its peers and beside what the machine can do: what `python -m benchmarks` runs.

`contenders` says who takes part with which models, `rounds` how contenders take turns, `suites` what is
timed, `results` what comes out, `comparisons` what follows from it, `targets` what we want of it.
"""
