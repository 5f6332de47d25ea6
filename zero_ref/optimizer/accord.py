"""What the ranks of an optimizer must have in common after its construction, and when it is compared.

`minimal.py` compares nothing. At construction the complete optimizer compares all that must be equal. Later
options may come to differ, two optimizers may be stepped in another order on one rank, or an update may be
lost on one rank. A comparison in every step would cost a message in every step. So ranks compare where they
agree on something anyway, and before updates 1, 2, 4, 8 and so on: an error that is there from the beginning
is found at once, and a long run pays for a few messages.

An update that one rank has lost must be known sooner, or the other ranks would train on. That rank rings an
`Alarm`, which costs the others no waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from zero_ref.comm.agreement import Fact, agreement
from zero_ref.comm.collectives import Alarm, Collectives
from zero_ref.optimizer.start_values import compare_start_values
from zero_ref.plan.calls import CHECK
from zero_ref.shard.built import Built
from zero_ref.shard.groups import ParamGroup, describe_options, plain
from zero_ref.shard.several import title

_MADE: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def number_on(process_group: object) -> int:
    """How many optimizers this rank has made on the group before this one: the same on all its ranks."""
    number = _MADE.get(process_group, 0)
    _MADE[process_group] = number + 1
    return number


LOAD = (
    "Load the last checkpoint of parameters and optimizer on all ranks, with load_sharded or with the "
    "load_state_dict of both, or construct a new optimizer."
)


class Accord:
    """The agreements of one optimizer after its construction.

    Args:
        comm: the optimizer's.
        alarm: tells other ranks of a lost update at once; None where the network has none.
        what: the optimizer in words: "optimizer 0 (AdamW)".

    Attributes:
        updates: how many were begun.
        lost: by rank, what its local optimizer raised in an update that other ranks have made. Without an
            alarm each rank knows only of itself.
        uncertain: why other ranks may have loaded a state that this rank has not; empty if none can have.
        replicas: the ranks that own the same slices in other groups, with which this rank then compares
            before every update; None if there are no other groups.
        compared: how many parameters, in their order, have had their start values compared.
    """

    def __init__(self, comm: Collectives, alarm: Alarm | None, what: str) -> None:
        self.comm, self.alarm, self.what = comm, alarm, what
        self.updates = 0
        self.lost: dict[int, str] = {}
        self.uncertain = ""
        self.replicas: Collectives | None = None
        self.compared = 0

    def before_update(self, built: Built, facts: Callable[[], list[str]]) -> None:
        """Compare before updates 1, 2, 4, 8, ..., with replicas before every update.

        Args:
            built: the parameters. The values from which ranks start are compared when they first appear here.
            facts: returns what must be the same on all ranks, `self.facts()` among it.
        Raises:
            RuntimeError: an update was lost; another rank failed, or is at another update or optimizer.
            ValueError: the facts differ. The next step compares again.
        Collective: all ranks of the group, with replicas of all groups.
        Cost: an all-gather of 32 bytes where it compares, with replicas one more among these.
        """
        if self.lost and self.replicas is None:
            self.check_nothing_lost()  # all ranks of the group know; those of other groups have to be told
        if self.compare("make", facts, anyway=self.replicas is not None):
            self.lost = {}  # if any, the same on all ranks
        self.updates += 1
        if self.compared < len(built.params):
            compare_start_values(self.comm, built, self.compared)
            self.compared = len(built.params)

    def compare(self, action: str, facts: Callable[[], list[str]], *, anyway: bool = False) -> bool:
        """Compare if the next update is 1, 2, 4, 8, ...; return whether it did.

        A rank that has left out a step then meets the others in it, and all raise. With replicas compare each
        time, unless the host would have to wait for an accelerator.

        Args:
            action: what this rank is about to do for that update.
            anyway: compare before other updates, too.
            facts, Raises, Collective, Cost: as `before_update`.
        """
        update = self.updates + 1
        anyway |= self.replicas is not None and self.replicas.control_device.type == "cpu"
        alone = self.comm.world_size == 1 and self.replicas is None
        compares = not alone and (anyway or update & self.updates == 0)
        if compares:
            action = f"{action} update {update} of {self.what}"
            with agreement(self.comm, action, CHECK, self.replicas) as found:
                found += facts()
        return compares

    def facts(self) -> list[str]:
        """Whether an update was lost on this rank, for networks on which no alarm has told the others.

        Raises:
            RuntimeError: an update was lost, and all ranks know.
        """
        self.check_nothing_lost()
        lost = "".join(self.lost.values())
        return [Fact(f"an update lost by {lost}" if lost else "no update lost", LOAD)]

    def ring(self, error: Exception) -> None:
        """Note that this owner's local optimizer raised, and ring the alarm: before new values are sent."""
        self.lost[self.comm.rank] = f"{type(error).__name__}: {error}"
        if self.alarm is not None:
            self.alarm.ring(self.lost[self.comm.rank], self.updates)

    def after_update(self, owners: Iterable[int]) -> None:
        """Note the alarms that came before the new values.

        If the local optimizers of all owners raised, no update is lost: the unsharded optimizer would have
        raised, too.
        """
        if self.alarm is not None:
            self.lost |= self.alarm.heard(self.updates)
            if self.lost and self.lost.keys() >= set(owners):
                self.lost = {}

    def check_nothing_lost(self) -> None:
        """Refuse to go on with parameters and a state that no unsharded optimizer could have.

        Raises:
            RuntimeError: an update was lost, and all ranks know.
        """
        if self.lost and self.alarm is not None:
            rank, error = min(self.lost.items())
            raise RuntimeError(
                f"rank {self.comm.rank}: in update {self.updates} of {self.what} the local optimizer of rank "
                f"{rank} raised {error}. The other ranks have made that update; for what rank {rank} owns it "
                f"is lost. {LOAD}"
            )

    def was_cut_off(self, action: str) -> None:
        """Note that the network failed while ranks agreed that all can load."""
        self.uncertain = (
            f"rank {self.comm.rank} was to {action}, and was cut off while ranks agreed that all can. This "
            "rank is as it was before; others may have loaded it, so training on would mix the two. Load a "
            "sharded checkpoint with its parameters, or start again."
        )

    def check_certain(self) -> None:
        """Refuse to go on where others may have another state.

        Raises:
            RuntimeError: with the reason.
        """
        if self.uncertain:
            raise RuntimeError(self.uncertain)

    @contextlib.contextmanager
    def made_good(self) -> Iterator[None]:
        """A context for loading parameters and state: it ends the uncertainty that a failed load has left."""
        before, self.uncertain = self.uncertain, ""
        try:
            yield
        except BaseException:
            self.uncertain = self.uncertain or before
            raise


def facts_of_options(param_groups: Sequence[ParamGroup], optim: Optimizer) -> list[str]:
    """What must be the same on all ranks at any time: the options, and state that belongs to no parameter.

    An optimizer that computes such a state from all its parameters gets another one on each rank, because it
    has other parameters there; then the ranks do not make one update together.
    """
    remedy = (
        "Set options alike on every rank, such as by a scheduler on each. If nobody has set this one, "
        f"{title(optim)} computes it from all parameters that it has, and cannot be sharded: take an "
        "optimizer that updates each parameter by itself."
    )
    lines = [
        f"group {index}: {option}"
        for index, group in enumerate(param_groups)
        for option in describe_options(group)
    ]
    lines += [
        f"state {key!r}: {plain(value)!r}"
        for key, value in optim.state.items()
        if (value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float, str)))
    ]
    return [Fact(line, remedy) for line in lines]
