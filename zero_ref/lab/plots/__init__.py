"""The pictures of the book and the demo: data in, a `Drawing` or matplotlib's `Axes` out.

>>> from zero_ref.plan.rules import sorted_greedy
>>> fig, ax = figure(6, 2)
>>> _ = shard_map(sorted_greedy([6, 5, 4, 1], world_size=2), ax)
>>> save(fig, "shards.svg")                                                     # doctest: +SKIP

A picture decides nothing: partitions, bytes and losses are computed elsewhere and drawn here. Ranks have the
same colour in every picture.

Those that give a `Drawing` are drawn by `zero_ref.live`, as SVG and without matplotlib, and so are the
explorers. A `Drawing` is drawn anew for each width, and a notebook shows one that is the last line of a cell;
`fitted` lets it show two, for a page and for a phone.

All others draw into the Axes that they are given, whoever made it, give it back, and touch no global state;
`figure` makes one in a figure that a notebook shows when it is the last line of a cell.

Who owns what: `shard_map`, `loads`, `loads_compared`, `balance_against_ranks`, `step_diagram`,
`flat_layout`.
What it costs: `memory_by_rank`, `ledger_stages`, `message_times`.
What a collective costs: `ring_rounds`, `bytes_on_wire`.
What a run gave: `loss_curves`, `predicted_against_measured`.
When it happens: `timeline`, `stages_timeline`. Who holds which piece when: `pieces_over_time`.
What moves to other ranks: `reshard`; who reads which bytes: `file_reads`.
What a simulation says: `memory_curve`, `memory_over_time`, `step_time_against_ranks`,
`volume_against_ranks`, `memory_against_ranks`, `memory_items`.
How far it can be trusted: `sensitivity`.
What to choose: `decision_tree`.
How gradients go to shards: `gradient_memory`, `reductions_against_ranks`, `hybrid_groups`.
What clipping does: `norms_together`.
Who trains alone: `drift`, `agreement`.
What lives on which worker: `ownership`, with a `Crossing` for each thing that is sent.
"""

from zero_ref.lab.plots._buckets import flat_layout, message_times
from zero_ref.lab.plots._bytes import ledger_stages, memory_by_rank
from zero_ref.lab.plots._drift import agreement, drift
from zero_ref.lab.plots._judged import sensitivity
from zero_ref.lab.plots._map import shard_map
from zero_ref.lab.plots._norms import norms_together
from zero_ref.lab.plots._ownership import Crossing, ownership
from zero_ref.lab.plots._reads import Read, file_reads
from zero_ref.lab.plots._reshard import reshard
from zero_ref.lab.plots._runs import loss_curves, predicted_against_measured
from zero_ref.lab.plots._sharded import gradient_memory, hybrid_groups, reductions_against_ranks
from zero_ref.lab.plots._simulated import StepParts, memory_curve, step_parts, step_time_against_ranks
from zero_ref.lab.plots._style import Picture, figure, panels, save
from zero_ref.lab.plots._volume import memory_against_ranks, volume_against_ranks
from zero_ref.lab.plots._wire import bytes_on_wire
from zero_ref.live.lanes import stages_timeline, timeline
from zero_ref.live.loads import balance_against_ranks, loads, loads_compared
from zero_ref.live.memory import memory_items
from zero_ref.live.memory_over_time import memory_over_time
from zero_ref.live.page import fitted
from zero_ref.live.palette import rank_colour, text_colour_on
from zero_ref.live.pieces import pieces_over_time
from zero_ref.live.ring import ring_rounds
from zero_ref.live.step import cut_each, step_diagram
from zero_ref.live.svg import Drawing
from zero_ref.live.tree import decision_tree

__all__ = [
    "figure",
    "panels",
    "save",
    "Picture",
    "Drawing",
    "fitted",
    "shard_map",
    "loads",
    "loads_compared",
    "balance_against_ranks",
    "step_diagram",
    "cut_each",
    "flat_layout",
    "memory_by_rank",
    "ledger_stages",
    "message_times",
    "ring_rounds",
    "bytes_on_wire",
    "loss_curves",
    "predicted_against_measured",
    "timeline",
    "stages_timeline",
    "pieces_over_time",
    "memory_curve",
    "StepParts",
    "step_parts",
    "step_time_against_ranks",
    "volume_against_ranks",
    "memory_against_ranks",
    "memory_items",
    "memory_over_time",
    "decision_tree",
    "gradient_memory",
    "reductions_against_ranks",
    "hybrid_groups",
    "sensitivity",
    "drift",
    "agreement",
    "ownership",
    "Crossing",
    "reshard",
    "file_reads",
    "Read",
    "norms_together",
    "rank_colour",
    "text_colour_on",
]
