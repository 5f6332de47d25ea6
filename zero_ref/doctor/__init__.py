"""Anybody's sharded optimizer, held against the plain loop on real ranks: `zero-ref doctor`.

- `diagnose`: the function; `report`: what it gives, in a terminal, as JSON, Markdown and JUnit's XML;
- `program`: what the doctor asks of a program; an adapter for another library overrides it;
- `trials`: the things that training does, one a trial, in pairs and all together;
- `model`: the model and its data;
- `nccl_on_gloo`: what NCCL's groups can do and Gloo's cannot, given to the program;
- `on_rank`: a trial with the program, on a rank; `plain`: the same in one process, the plain loop;
- `all_data`: how much each rank's batch counts there;
- `trace`, `compare`: what was noted, and where the two depart by more than rounding explains;
- `reading`: in which phase that begins, and what can be read off the numbers; `weights`: the equation for it;
- `watch`, with `shadow` and `watched`: a running job, in place of a program that the doctor drives;
- `interface`: a class, checked by its interface alone.
"""

from __future__ import annotations

from zero_ref.doctor.diagnose import diagnose
from zero_ref.doctor.program import NotSupportedError, Program
from zero_ref.doctor.report import Departure, NotTried, Raised, Report
from zero_ref.doctor.trials import NAMES as TRIALS

__all__ = ["diagnose", "Program", "NotSupportedError", "Report", "Departure", "Raised", "NotTried", "TRIALS"]
