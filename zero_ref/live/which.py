"""The explorer "which stage?": a model, its ranks and a batch under every way, and what to choose."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from zero_ref.live.explorer import RANKS, Answer, Control, Explorer, controls_of
from zero_ref.live.lanes import COLOURS
from zero_ref.live.memory import VERDICTS as MEMORY_VERDICTS, WITH_MEMORY, device_mark, scale_bytes
from zero_ref.live.numbers import short_bytes, short_time
from zero_ref.live.palette import ALARM, INK, PART_COLOURS, tint
from zero_ref.live.svg import LINE, MARGIN, Stacked, bar, key, picture, text, text_width
from zero_ref.live.tree import tree_parts
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.models import TRANSFORMERS
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref.simulator.which import ALIKE, BEYOND, Compared, compared

VERDICTS = {True: "fits", None: "undecided", False: "does not fit"}

MEMORY, COMPUTING, EXPOSED = tint(PART_COLOURS["parameters"], 0.55), COLOURS["backward"], ALARM

HIGH = 11.0
"""Pixels of a bar; each way has one of memory and one of time."""


def _draw(width: float, **of_scenario: Any) -> Answer:
    found = _compared(**of_scenario)
    scenario = found.scenario
    device = scenario.cluster.device
    device_bytes = 1e9 * (device.memory_gb or 0)
    words = _words(found, of_scenario["model"])
    rows = [["", "memory", "fits", "sent by a rank", "exposed", "an update takes"]]
    numbers: dict[str, float] = {
        "device, bytes": device_bytes,
        "tokens of a pass": scenario.tokens_of_pass,
        "tokens to hide what all ranks gather": found.tokens_needed,
        "tokens to hide what a node gathers": found.tokens_needed_in_node,
        "share that dividing the step saves": found.saved_by_dividing,
    }
    for name, run in found.runs.items():
        rows.append(
            [
                name,
                short_bytes(run.peak_bytes),
                VERDICTS[run.fits],
                short_bytes(run.sent_bytes),
                short_time(run.exposed_ms),
                short_time(run.iteration_ms),
            ]
        )
        numbers |= {
            f"{name}, memory, bytes": run.peak_bytes,
            f"{name}, sent, bytes": run.sent_bytes,
            f"{name}, exposed, ms": run.exposed_ms,
            f"{name}, update, ms": run.iteration_ms,
        }
    parts, y = _ways(found, device_bytes, width)
    parts.append(text(MARGIN, y + 14, "The questions, and the way of this model", bold=True))
    tree, bottom = tree_parts(found.tree, found.path, MARGIN, y + LINE + 12, width - 2 * MARGIN)
    return Answer(picture(width, bottom, words, [*parts, *tree]), words, rows, numbers)


@lru_cache(maxsize=8)
def _compared(model: str, cluster: str, ranks: int, **of_scenario: Any) -> Compared:
    """Another width asks for the same."""
    return compared(Scenario(TRANSFORMERS[model], CLUSTERS[cluster], ranks, **of_scenario))


def _words(found: Compared, model: str) -> str:
    """Describe the model and its ranks, the tree's advice, and how much slower that is than the fastest."""
    scenario, advice = found.scenario, found.advice
    ranks, passes = scenario.world_size, scenario.accumulation
    batch = f"{scenario.tokens_of_pass:,} tokens a pass"
    batch += f", {passes} passes an update" if passes > 1 else ""
    on = f"{model} on {ranks:,} rank{'s' if ranks > 1 else ''} of {scenario.cluster.name}, {batch}: "
    if found.fastest is None or found.behind is None:
        leanest = min(found.runs.values(), key=lambda run: run.peak_bytes)
        held = f"The leanest way needs {short_bytes(leanest.peak_bytes)}{MEMORY_VERDICTS[leanest.fits]}"
        end = BEYOND if leanest.fits is False else f"try it, keep fewer activations, or go {BEYOND}"
        return f"{on}no way surely fits. {held} Advice: {end}."
    advised, fastest = found.runs[advice.name], found.runs[found.fastest]
    took = f"an update takes {short_time(advised.iteration_ms)} in {short_bytes(advised.peak_bytes)}"
    nearly = f"{advice.because}. " if advice.name == found.rival else ""
    if advice.name == found.fastest:
        return f"{on}choose {advice.name}. {nearly}{_sentence(took)}, and nothing that surely fits is faster."
    behind = f"{found.fastest} would take {short_time(fastest.iteration_ms)}"
    saved = 1 - fastest.iteration_ms / advised.iteration_ms
    off = f"{saved:.0%} less" if found.behind > ALIKE else "which is about the same"
    return f"{on}choose {advice.name}. {nearly}{_sentence(took)}; {behind}, {off}."


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _ways(found: Compared, device_bytes: float, width: float) -> Stacked:
    """For each way a bar of memory beside the device's, and one of time with what is exposed."""
    wide = width - 2 * MARGIN
    names = {"memory of the fullest rank": MEMORY, "time of an update": COMPUTING, "exposed in it": EXPOSED}
    parts, y = key(names, MARGIN, 14, wide)
    most = scale_bytes([run.peak_bytes for run in found.runs.values()], device_bytes)
    longest = max(run.iteration_ms for run in found.runs.values())
    top = y + LINE
    y = top + 2
    for name, run in found.runs.items():
        chosen = name == found.advice.name
        fill = ALARM if run.fits is False else INK
        title = f"{'▸ ' if chosen else ''}{name}"
        parts.append(text(MARGIN, y + 13, title, fill=fill, bold=chosen, halo=True))
        said = f"{short_bytes(run.peak_bytes)}, {short_time(run.iteration_ms)}"
        verdict = "" if run.fits else f", {VERDICTS[run.fits]}"
        if text_width(title + said + verdict) + 12 <= wide:
            said += verdict
        parts.append(text(MARGIN + wide, y + 13, said, fill=fill, anchor="end", bold=chosen, halo=True))
        parts += _bars(run, y + LINE + 1, wide / most, wide / longest)
        y += LINE + 2 * HIGH + 12
    mark = device_mark(device_bytes, most, MARGIN, wide, top, y - 6)
    return [*mark, *parts], y + 10


def _bars(run: SimulatedRun, y: float, px_per_byte: float, px_per_ms: float) -> list[str]:
    computing = px_per_ms * (run.iteration_ms - run.exposed_ms)
    exposed = px_per_ms * run.exposed_ms
    return [
        bar(MARGIN, y, px_per_byte * run.peak_bytes, HIGH, MEMORY, f"memory: {short_bytes(run.peak_bytes)}"),
        bar(MARGIN, y + HIGH + 1, computing, HIGH, COMPUTING, f"time: {short_time(run.iteration_ms)}"),
        bar(
            MARGIN + computing, y + HIGH + 1, exposed, HIGH, EXPOSED, f"exposed: {short_time(run.exposed_ms)}"
        ),
    ]


WHICH = Explorer(
    "which",
    "Which stage?",
    (
        Control("model", "model", "llama3-8b", tuple(TRANSFORMERS)),
        Control("cluster", "cluster", "h100-ib", WITH_MEMORY),
        Control("ranks", "ranks", 8, RANKS),
        *controls_of(Scenario, ("batch", "sequence", "checkpointing"), sequence=4096, checkpointing="full"),
        Control("accumulation", "passes of an update", 1, (1, 2, 4, 8, 16)),
    ),
    _draw,
)
"""All ways are timed, those that do not fit too, so that a reader sees what more memory would give."""
