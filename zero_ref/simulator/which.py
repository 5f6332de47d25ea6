"""Which stage: every way to train a model on some ranks, and a rule of thumb beside the fastest that fits.

`compared` simulates DDP, the stages and the hybrid for one model, cluster and batch. TREE asks the questions
that decide among them, each answered by a line of arithmetic. `Compared` has both: what the tree advises, and
how much longer that takes than the fastest way that surely fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from zero_ref.simulator import spread
from zero_ref.simulator._checks import check_number
from zero_ref.simulator.activations import kinds_apart
from zero_ref.simulator.device import Device
from zero_ref.simulator.models import blocks
from zero_ref.simulator.operations import COMPUTE, Operation
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref.simulator.schedule import MIB
from zero_ref.simulator.stages import runs_by_stage
from zero_ref.simulator.tree import Advice, Node, Question, nodes_on

ALIKE = 0.05
"""Ways whose times differ by this share are taken as equally fast. It is a choice, no measurement: what the
simulator leaves out, such as computing that a message disturbs, may be as much."""

CLOSE = 1.5
"""A pass's tokens are close to those of `tokens_to_hide` if neither is more than so many times the other.

It covers the error of the rule. Where blocks are computed again, backward makes 6 operations for each
parameter and token, and the rule counts 4: from 1/1.5 of its tokens on, backward hides all. The rule takes W
from one gather of the largest block. The calls for small blocks are slower, so a run may also need more
tokens than the rule says. tests/simulator/test_which.py holds the rule against the simulator.
"""

AS_FAST, LESS_MEMORY = 0.01, 0.1
"""Close to the tokens needed, another way is taken that takes at most this share longer than the tree's, and
needs at least that share less memory; or one that takes more than ALIKE less time."""

MANY_RANKS, WIDE_RANGES = 64, 128 * MIB
"""Among more than so many ranks, the bytes of stage 2's ranges."""

LITTLE = 0.1
"""A share of the device's memory that is not worth another way than DDP. It is a choice too."""

SHORT_BLOCK_MS = 1.0
"""Milliseconds of a block's forward below which the host may not keep pace under stage 3. It is a choice.

`fully_shard` runs Python before and after each block. The simulator does not count this time, which the GPU
waits for where a block takes less. A user of torch 2.10 measured 1 ms before each module alone
(https://github.com/pytorch/pytorch/issues/173680).
"""

# ------------------------------------------------------------------------------------------------- the rules


def tokens_to_hide(tflops: float, gb_per_s: float, world_size: int) -> float:
    """The fewest tokens of a pass, on each rank, with which the network has no more to do than the rank.

    It is C/W (N-1)/N, with C operations and W bytes a second. Forward makes 2 operations for each parameter
    and token, and stage 3 gathers the 2 bytes of each parameter meanwhile, of which (N-1)/N arrive. Backward
    makes 4, beside a gather and a reduce-scatter at stage 3, or beside DDP's all-reduce, which moves all
    gradients twice: the same number of tokens. Latency is not counted.

    >>> tokens_to_hide(400, 50, 64)
    7875.0

    Args:
        tflops: 10^12 operations a second that a rank reaches.
        gb_per_s: 10^9 bytes a second that arrive at each rank of a ring.
    Raises:
        ValueError: a rate is not above 0, or there is no rank.
    """
    check_number("tflops", tflops, above=True)
    check_number("gb_per_s", gb_per_s, above=True)
    if world_size < 1:
        raise ValueError(f"there is at least 1 rank, got world_size={world_size}.")
    return 1e3 * tflops / gb_per_s * (world_size - 1) / world_size


def tokens_for_short_update(tflops: float, memory_gb_per_s: float, share: float = ALIKE) -> float:
    """The fewest tokens of an update, on each rank, with which a whole step is a small share of the time.

    AdamW on 32-bit masters reads and writes 28 bytes for each parameter. The passes make 6 operations for
    each parameter and token.

    >>> round(tokens_for_short_update(400, 2850))
    12444

    Args:
        tflops: 10^12 operations a second that a rank reaches.
        memory_gb_per_s: 10^9 bytes a second that a rank reads or writes in its memory.
        share: of the time of an iteration.
    Raises:
        ValueError: a rate is not above 0, or the share is not between 0 and 1.
    """
    check_number("tflops", tflops, above=True)
    check_number("memory_gb_per_s", memory_gb_per_s, above=True)
    if not 0 < share < 1:
        raise ValueError(f"share is above 0 and below 1, got {share:g}.")
    return (1 - share) / share * 28 / 6 * 1e3 * tflops / memory_gb_per_s


def room_gb(device: Device) -> float:
    """Return the memory of a device, in 10^9 bytes, that tensors may take in a run that surely fits.

    The rest is for libraries, for what the allocator reserves, and for the error of predictions.

    >>> from zero_ref.simulator.cluster import cluster
    >>> h100 = cluster("h100-ib").device
    >>> round(h100.memory_gb, 1), round(room_gb(h100))
    (85.5, 66)

    Raises:
        ValueError: the device's memory is not known.
    """
    if device.memory_gb is None:
        raise ValueError(f"the memory of {device.name} is not known: give the device a memory_gb.")
    return (device.memory_gb / spread.MEMORY.high - device.library_gb) / (1 + device.allocator_share)


# -------------------------------------------------------------------------------------------------- the tree

BEYOND = "beyond ZeRO"

LEAST = "Does it fit when each rank keeps only its share?"
HIDES = "Does a pass hide what all ranks gather?"
SMALL = "Does it fit whole, with little to gain by dividing?"
SEVERAL = "Has an update several passes, and do whole parameters fit?"
SHORT = "Is the pass short, and does stage 1 fit?"
IN_NODE = "Do gathers inside a node pay?"
PASSES = "Are passes several and very short, and do whole gradients fit?"
STAGE_2 = "Do whole parameters fit?"

WHOLE = "Does it fit whole, with one short pass or little to gain by dividing?"

_WHOLE = "18 Ψ bytes + activations < room"
_LITTLE = "18 Ψ < a tenth of the device, and tokens of an update > 89 C/B or the pass short"
_STAGE_2 = "(2 + 14/N) Ψ bytes + activations < room"
_IS_SHORT = "2 Ψ t/(L C) < 1 ms, for a block"

TREE = Question(
    LEAST,
    threshold="16 Ψ/N bytes + two blocks and the root + activations < room",
    no=Advice(BEYOND, "More ranks, fewer activations, or another kind of parallelism"),
    yes=Question(
        HIDES,
        threshold="tokens of a pass > C/W · (N−1)/N",
        yes=Question(
            SMALL,
            threshold=f"{_WHOLE}; {_LITTLE}",
            yes=Advice("DDP", "The simplest way, and dividing saves next to nothing"),
            no=Question(
                SEVERAL,
                threshold=_STAGE_2,
                yes=Advice("stage 2", "Reductions hide in backward; one gather an update"),
                no=Question(
                    SHORT,
                    threshold=f"{_IS_SHORT}; (6 + 12/N) Ψ bytes + activations < room",
                    yes=Advice("stage 1", "One line more than DDP: the step is divided"),
                    no=Advice("stage 3", "The least memory, and hardly a wait"),
                ),
            ),
        ),
        no=Question(
            IN_NODE,
            threshold="16 Ψ/n bytes + two blocks and the root + activations < room; nodes < 2/3 W inside/W "
            "but for several short passes, or one pass, not short, of tokens > C/W · (n−1)/n inside",
            yes=Advice("hybrid", "Gathers stay inside; only a share crosses"),
            no=Question(
                WHOLE,
                threshold=f"{_WHOLE}; one short pass, or {_LITTLE}",
                yes=Advice("DDP", "The simplest way, and no way sends fewer bytes"),
                no=Question(
                    PASSES,
                    threshold="tokens of a pass < half of C/W · (N−1)/N; "
                    "(4 + 14/N) Ψ bytes + activations < room",
                    yes=Advice("stage 2, no_sync", "One reduction for all passes: 2 Ψ elements sent"),
                    no=Question(
                        STAGE_2,
                        threshold=_STAGE_2,
                        yes=Advice("stage 2", "As few bytes as DDP, and less memory"),
                        no=Advice("stage 3", "It waits for its network: use more tokens"),
                    ),
                ),
            ),
        ),
    ),
)
"""The questions, in the order in which they are asked, each end the name of a way, or BEYOND.

Ψ is the number of parameters, in 16 bits beside 32-bit masters, N the number of ranks, L that of blocks, t
the tokens of a pass. In a second a rank makes C operations, receives W bytes from the network, and reads or
writes B bytes of its memory. `room_gb` is the room. A `Compared` knows how much memory a way needs and
whether it surely fits, and takes that in place of the formulas.

The lowest stage that fits is taken unless a higher one frees memory at no cost in time. Stage 3 does so where
one long pass hides its gathers. In several passes it writes the gathered blocks to memory in each. In short
ones the host may need longer to start the work of a block than the block takes, which is not simulated, so
there the simplest way is taken.
With several passes the hybrid adds up shards, and all-reduces them between nodes once. To keep gradients
whole until then (`no_sync`) is a few percent faster, and takes the memory of all, so it is not advised.
Where a pass has about as many tokens as HIDES asks for (CLOSE), the rule cannot tell, and a `Compared` lets
the simulated times of the ways decide.
tests/simulator/test_which.py holds the advice against the simulator: no other is as fast with less memory.
Left out are short passes, what frees less than LITTLE, and cases at the edge of a rule, which the test lists.
"""


def way_through(node: Node, found: Mapping[str, bool]) -> tuple[bool, ...]:
    """The answers on the way from a node to an advice, given those to all questions by their text.

    >>> way_through(TREE, {LEAST: True, HIDES: True, SMALL: True})
    (True, True, True)
    """
    answers: list[bool] = []
    while isinstance(node, Question):
        answers.append(found[node.text])
        node = node.yes if answers[-1] else node.no
    return tuple(answers)


# -------------------------------------------------------------------------------------------- the comparison


def ways_of(scenario: Scenario) -> dict[str, SimulatedRun]:
    """Simulate every way: those of `runs_by_stage`; with several passes to an update also under `no_sync`.

    Under `no_sync` gradients are whole on every rank until the last backward, and are reduced once. For
    stage 2 this is what the ZeRO paper calls stage 1. Among more than MANY_RANKS ranks stage 2 has
    WIDE_RANGES, unless the scenario says how large its ranges are: the shares of usual ones are so small that
    latency decides.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> gpt2 = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8, accumulation=4)
    >>> list(ways_of(gpt2))
    ['DDP', 'stage 1', 'stage 2', 'stage 2, no_sync', 'stage 3', 'stage 3, no_sync']

    Args:
        scenario: its own `no_sync`, `all_reduce_last` and `shard_group` are not used.
    Raises:
        ValueError: as `Scenario.run`.
    """
    scenario = replace(scenario, no_sync=False, shard_group=None, all_reduce_last=False)
    runs: dict[str, SimulatedRun] = {}
    for name, run in runs_by_stage(scenario).items():
        if name == "stage 2" and scenario.world_size > MANY_RANKS and scenario.bucket_bytes is None:
            run = replace(scenario, bucket_bytes=WIDE_RANGES).run(run.strategy)
        runs[name] = run
        if scenario.accumulation > 1 and recipe(run.strategy).in_groups:
            whole = run.scenario.like(no_sync=True, all_reduce_last=False)
            runs[f"{name}, no_sync"] = whole.run(run.strategy)
    return runs


def compared(scenario: Scenario) -> Compared:
    """All ways of a scenario, and what the tree advises.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> found = compared(Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 8, checkpointing="full"))
    >>> found.fastest, found.advice.name, found.behind
    ('stage 3', 'stage 3', 0.0)

    Raises:
        ValueError: as `ways_of`.
    """
    return Compared(scenario, ways_of(scenario))


def compared_leaner(scenario: Scenario) -> Compared:
    """The same; where no way surely fits, with the checkpointing that lets one fit and computes least again.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> found = compared_leaner(Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 16))
    >>> found.scenario.checkpointing, found.advice.name
    ('every-other-block', 'stage 3')

    Raises:
        ValueError: as `ways_of`.
    """
    found = compared(scenario)
    if found.fastest is not None or scenario.kernels is None:
        return found
    kinds = kinds_apart(scenario.attention)
    for kind in kinds[1 + kinds.index(scenario.checkpointing) :] if scenario.checkpointing in kinds else ():
        leaner = compared(scenario.like(checkpointing=kind))
        if leaner.fastest is not None:
            return leaner
    return found


@dataclass(frozen=True)
class Compared:
    """Every way to train one model on some ranks.

    Args:
        runs: by the name of the way, as `ways_of` gives them.
    """

    scenario: Scenario
    runs: Mapping[str, SimulatedRun] = field(repr=False)

    @property
    def fitting(self) -> list[str]:
        """The ways that surely fit, the fastest first; all of them where the device's memory is not known."""
        known = self.scenario.cluster.device.memory_gb is not None
        names = [name for name, run in self.runs.items() if run.fits or not known]
        return sorted(names, key=lambda name: self.runs[name].iteration_ms)

    @property
    def fastest(self) -> str | None:
        """The fastest way that surely fits; None if no way does."""
        return next(iter(self.fitting), None)

    @cached_property
    def found(self) -> dict[str, bool]:
        """The answer to each question of TREE, by its text."""
        tokens, fits = self.scenario.tokens_of_pass, set(self.fitting)
        several, is_short = self.scenario.accumulation > 1, self.block_ms < SHORT_BLOCK_MS
        inside = tokens >= self.tokens_needed_in_node and not (is_short or several)
        inside = inside or (self.has_few_nodes and not (is_short and several))
        little = self.freed_by_dividing <= LITTLE and (self.saved_by_dividing <= ALIKE or is_short)
        return {
            LEAST: bool(fits),
            HIDES: "stage 3" in fits and tokens >= self.tokens_needed,
            SMALL: "DDP" in fits and little,
            SEVERAL: "stage 2" in fits and several,
            SHORT: "stage 1" in fits and is_short,
            IN_NODE: "hybrid" in fits and inside,
            WHOLE: "DDP" in fits and (little or (is_short and not several)),
            PASSES: "stage 2, no_sync" in fits and tokens < self.tokens_needed / 2,
            STAGE_2: "stage 2" in fits,
        }

    @cached_property
    def tree(self) -> Question:
        """TREE with the numbers that decide; at the end of the model's way what simulated times decide."""
        tree = self._answered(TREE, way_through(TREE, self.found))
        assert isinstance(tree, Question)
        return tree

    def _answered(self, node: Node, way: tuple[bool, ...] | None) -> Node:
        """Fill in the numbers of a node and all below it; `way` leads on to the advice, None off the way."""
        if isinstance(node, Advice):
            return node if way is None else self._close_call or node
        yes = self._answered(node.yes, way[1:] if way and way[0] else None)
        no = self._answered(node.no, way[1:] if way and not way[0] else None)
        return node._replace(yes=yes, no=no, answered=self._numbers[node.text])

    @property
    def is_close(self) -> bool:
        """Whether a pass has about as many tokens as HIDES asks for, so that the rule cannot tell."""
        tokens = self.scenario.tokens_of_pass
        return self.tokens_needed / CLOSE <= tokens <= self.tokens_needed * CLOSE

    @cached_property
    def rival(self) -> str | None:
        """The way that is compared with the tree's by simulated time; None where the rule tells.

        Where the tokens are close to those needed, it is one of what the tree advises if a pass hides all
        gathers, of what it advises if not, and of stage 3: one that is better than the tree's, or else the
        fastest. None also where the pass is short, for which the simulator counts too little, and where DDP
        is advised, as there is little to gain by another way.
        """
        name = self._of_tree.name
        if name == "DDP" or self.block_ms < SHORT_BLOCK_MS or not self.is_close:
            return None
        ways = {_advice_of(self.found | {HIDES: hides}).name for hides in (True, False)} | {"stage 3"}
        others = [one for one in self.fitting if one in ways and one != name]  # the fastest first
        return min(others, key=lambda one: not self._is_better(one, name), default=None)

    @property
    def _of_tree(self) -> Advice:
        return _advice_of(self.found)

    @property
    def _close_call(self) -> Question | None:
        """The question that simulated times answer where the tokens are close to those needed."""
        if self.rival is None:
            return None
        rival, of_tree = self.rival, self._of_tree
        one, other = self.runs[rival], self.runs[of_tree.name]
        less = 1 - one.iteration_ms / other.iteration_ms
        close = f"{self.scenario.tokens_of_pass:,} tokens, {_needed(self.tokens_needed)}"
        said = f"{rival} takes {abs(less):.0%} {'less' if less > 0 else 'more'} time"
        memory = f"and {one.peak_bytes / 1e9:,.1f} GB, not {other.peak_bytes / 1e9:,.1f}"
        return Question(
            f"These tokens are close to those needed. Simulated, is {rival} better than {of_tree.name}?",
            threshold=f"over {ALIKE:.0%} less time, or no more time in {LESS_MEMORY:.0%} less memory",
            answered=f"{said}, {memory}",
            yes=Advice(rival, f"Nearly: {close}; simulated, {said} than {of_tree.name}, {memory}"),
            no=of_tree,
        )

    def _is_better(self, name: str, than: str) -> bool:
        """Whether a way is faster than another by more than ALIKE, or as fast in less memory."""
        one, other = self.runs[name], self.runs[than]
        longer = one.iteration_ms / other.iteration_ms - 1
        is_leaner = one.peak_bytes <= (1 - LESS_MEMORY) * other.peak_bytes
        return longer < -ALIKE or (longer <= AS_FAST and is_leaner)

    @cached_property
    def _numbers(self) -> dict[str, str]:
        """The quantity that decides each question, in words."""
        passes, tokens = self.scenario.accumulation, f"{self.scenario.tokens_of_pass:,} tokens"
        leanest = min(self.runs, key=lambda name: self.runs[name].peak_bytes)
        several = f"{passes} passes" if passes > 1 else "one pass"
        block = f"{self.block_ms:.1f} ms a block"
        in_node = "the ranks do not fill several nodes"
        if "hybrid" in self.runs:
            nodes = f"{self.scenario.world_size // self.scenario.cluster.ranks_per_node} nodes"
            in_node = f"{several}; {self._memory('hybrid')}; {nodes}, few are below {self.few_nodes:.1f}; "
            in_node += f"{tokens}, {_needed(self.tokens_needed_in_node)}; {block}"
        step = f"dividing the step saves {self.saved_by_dividing:.0%}"
        return {
            LEAST: f"{leanest}: {self._memory(leanest)}",
            HIDES: f"{tokens}, {_needed(self.tokens_needed)}",
            SMALL: f"{self._memory('DDP')}; {step}, {block}",
            SEVERAL: f"{several}; {self._memory('stage 2')}",
            SHORT: f"{block}; {self._memory('stage 1')}",
            IN_NODE: in_node,
            WHOLE: f"{self._memory('DDP')}; {step}, {several}, {block}",
            PASSES: f"{several}; {self._memory('stage 2, no_sync')}" if passes > 1 else several,
            STAGE_2: self._memory("stage 2"),
        }

    def _memory(self, name: str) -> str:
        """Return the memory that a way needs and that the device has, in words."""
        memory_gb = self.scenario.cluster.device.memory_gb
        needed = f"{self.runs[name].peak_bytes / 1e9:,.1f}"
        verdict = ", undecided" if memory_gb is not None and self.runs[name].fits is None else ""
        return f"{needed} GB" if memory_gb is None else f"{needed} of {memory_gb:.1f} GB{verdict}"

    @cached_property
    def path(self) -> tuple[bool, ...]:
        """The answers on the way through the tree, from the first question to an advice."""
        way = way_through(TREE, self.found)
        return way if self.rival is None else (*way, self._is_better(self.rival, self._of_tree.name))

    @cached_property
    def advice(self) -> Advice:
        """The advice at the end of that way."""
        advice = nodes_on(self.tree, self.path)[-1]
        assert isinstance(advice, Advice)
        return advice

    @property
    def behind(self) -> float | None:
        """Share by which an iteration of the advised way takes longer than one of the fastest way.

        None where nothing fits.
        """
        if self.fastest is None:
            return None
        advised, least = self.runs[self.advice.name], self.runs[self.fastest]
        return advised.iteration_ms / least.iteration_ms - 1

    # ------------------------------------------------------------------------------------ what decides

    @property
    def tflops_reached(self) -> float:
        """C: 2 operations for each parameter and token, in 10^12 a second of a forward without a network."""
        operations = 2 * self.scenario.numel * self.scenario.tokens_of_pass
        return operations / (1e9 * self._computing_ms("forward"))

    @property
    def gb_per_s(self) -> float:
        """W: the 10^9 bytes a second that arrive at each rank while all gather the largest block."""
        return self._arriving(self.scenario.world_size)

    @property
    def tokens_needed(self) -> float:
        """The tokens that a pass needs to hide the gathers of all ranks, latency included."""
        return self._needed(self.scenario.world_size)

    @property
    def tokens_needed_in_node(self) -> float:
        """The tokens that a pass needs to hide the gathers of the ranks of a node."""
        return self._needed(min(self.scenario.world_size, self.scenario.cluster.ranks_per_node))

    @property
    def few_nodes(self) -> float:
        """The number of nodes below which the hybrid waits less for a slow network than a ring of all ranks.

        A ring of N ranks takes 4 Ψ (N-1)/N bytes of gradients and new parameters into each node. The hybrid
        takes those of an all-reduce over m nodes, 4 Ψ (m-1)/m, and moves 6 Ψ (n-1)/n bytes inside. So it
        waits less if m is below two thirds of the rate inside over the rate of the ring.
        """
        ranks, of_node = self.scenario.world_size, self.scenario.cluster.ranks_per_node
        return 2 / 3 * self._arriving(min(of_node, ranks)) / self._arriving(ranks)

    @property
    def has_few_nodes(self) -> bool:
        """Whether the nodes are fewer than `few_nodes`."""
        return self.scenario.world_size / self.scenario.cluster.ranks_per_node < self.few_nodes

    @property
    def saved_by_dividing(self) -> float:
        """The share of an update's computing that dividing the step among the ranks can save."""
        update_ms = self._computing_ms("step")
        passes_ms = self._computing_ms("forward") + self._computing_ms("backward")
        share = update_ms / (update_ms + self.scenario.accumulation * passes_ms)
        return share * (1 - 1 / self.scenario.world_size)

    @property
    def freed_by_dividing(self) -> float:
        """The part of the device's memory that the leanest way needs less than DDP; 0 if it is not known."""
        least = min(run.peak_bytes for run in self.runs.values())
        memory_gb = self.scenario.cluster.device.memory_gb
        return 0.0 if memory_gb is None else (self.runs["DDP"].peak_bytes - least) / (1e9 * memory_gb)

    @property
    def block_ms(self) -> float:
        """Milliseconds of the forward of one block, without a network."""
        return self._computing_ms("forward") / max(1, len(blocks(self.scenario.params)) - 1)

    def _needed(self, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        if not self.scenario.cluster.overlaps:  # nothing hides
            return math.inf
        return tokens_to_hide(self.tflops_reached, self._arriving(ranks), ranks)

    def _arriving(self, ranks: int) -> float:
        itemsize = self.runs["DDP"].schedule.parameter_bytes[0] / self.scenario.numel
        _, *units = blocks(self.scenario.params) or [[]]
        numels = [sum(self.scenario.params[one].numel for one in unit) for unit in units]
        nbytes = itemsize * max(numels, default=self.scenario.numel)
        gather_ms = self.scenario.cluster.ms("all_gather", nbytes, ranks)
        return nbytes * (ranks - 1) / ranks / (1e6 * gather_ms) if gather_ms else math.inf

    def _computing_ms(self, label: str) -> float:
        """Milliseconds of one pass's forward or backward, or of a whole update, on one rank alone."""
        alone = self.scenario.workload
        tensors = len(self.scenario.params)
        one = Operation(label, COMPUTE, numel=self.scenario.numel, tensors=tensors)
        return alone.compute_ms(one, self.scenario.numel, self.scenario.cluster.device)


def _advice_of(found: Mapping[str, bool]) -> Advice:
    """The advice of TREE for the answers to all its questions."""
    advice = nodes_on(TREE, way_through(TREE, found))[-1]
    assert isinstance(advice, Advice)
    return advice


def _needed(tokens: float) -> str:
    return "nothing hides here" if tokens == math.inf else f"{tokens:,.0f} needed"
