"""This optimizer beside its peers and beside what the machine can do: what `zero-ref bench` runs.

`sets` are the models, `contenders` who takes part, `rounds` how they take turns, `suites` what is timed,
`results` what comes out, `targets` what we want of it.
"""
