"""The measurements of `python -m benchmarks gpu` on a machine with accelerators, in at most ten minutes.

`report` runs the sections and collects what they find, `benchmarks.tables` shows it. `step`, `memory` and
`speed` measure: each has a function that takes a device and gives plain values for JSON. They run on a CPU
too, where their logic is tested; None stands for what only an accelerator can tell.
"""
