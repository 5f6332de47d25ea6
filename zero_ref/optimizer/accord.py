"""The agreements of ranks after construction: options are equal, updates come in one order, none is lost.

`stairs/owners.py` compares nothing. The complete optimizer compares everything that must be equal when it is
constructed. Later options may come to differ, one rank may step two optimizers in another order, or one rank
may lose an update. A comparison in every step would cost a message in every step. So ranks compare whenever
they agree on something else, and before updates 1, 2, 4, 8 and so on: an error that exists from the beginning
is found at once, and a long run pays for a few messages only.

If one rank has lost an update, the others must know sooner, or they would train on. The rank rings an
`Alarm`, for which the others do not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

from zero_ref.comm.agreement import Agreement, Fact
from zero_ref.comm.collectives import Alarm, Collectives
from zero_ref.optimizer.start_values import compare_start_values
from zero_ref.plan.calls import CHECK
from zero_ref.shard.built import Built

# Ranks construct the optimizers of a group in the same order, so they number them alike without
# communicating.
_optimizers_on: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def number_on(process_group: object) -> int:
    """Give the next optimizer on the group its number, from 0: the same number on all ranks of the group."""
    number = _optimizers_on.get(process_group, 0)
    _optimizers_on[process_group] = number + 1
    return number


LOAD = (
    "Load the last checkpoint of parameters and optimizer on all ranks, with load_sharded or with the "
    "load_state_dict of both, or construct a new optimizer."
)


class Accord(Agreement):
    """The agreements of one optimizer after its construction.

    Args:
        comm: the calls to the ranks of the optimizer.
        alarm: tells other ranks of a lost update at once; None where the network has none.
        what: the optimizer in words: "optimizer 0 (AdamW)".

    Attributes:
        updates: the number of updates that were begun.
        lost: by rank, the error of its local optimizer in an update that other ranks have made. Without an
            alarm each rank knows only its own error.
        uncertain: the reason why this rank must not go on: other ranks may have loaded a state that it has
            not, or `train` or `eval` raised on some ranks only. Else empty.
        replicas: the ranks that own the same slices in other groups, with which this rank then compares
            before every update; None if there are no other groups.
        compared: the number of parameters, from the first, whose start values have been compared.
    """

    def __init__(self, comm: Collectives, alarm: Alarm | None, what: str) -> None:
        super().__init__(comm)
        self.alarm, self.what = alarm, what
        self.updates = 0
        self.lost: dict[int, str] = {}
        self.uncertain = ""
        self.replicas: Collectives | None = None
        self.compared = 0

    def before_update(self, built: Built, facts: Callable[[], list[str]]) -> None:
        """Compare before updates 1, 2, 4, 8, ..., with replicas before every update.

        Args:
            built: the parameters. Start values of parameters that are new here are compared too.
            facts: returns the facts that must be equal on all ranks, which include `self.facts()`.
        Raises:
            RuntimeError: an update was lost; another rank failed, or is at another update or optimizer.
            ValueError: the facts differ. The next step compares again.
        Collective: all ranks of the group, with replicas of all groups.
        Cost: an all-gather of 32 bytes where it compares, with replicas one more among these.
        """
        # 1. A lost update. With an alarm, every rank of this group knows of it and raises here. With
        # replicas, the comparison below has to carry the news to the other groups first.
        if self.lost and self.replicas is None:
            self.check_nothing_lost()
        # 2. The facts.
        if self.compare("make", facts, anyway=self.replicas is not None):
            self.lost = {}  # ranks have agreed, so it is empty on all of them, or the same on all
        self.updates += 1
        # 3. The start values, once for each parameter.
        if self.compared < len(built.params):
            compare_start_values(self.comm, built, self.compared)
            self.compared = len(built.params)

    def compare(self, action: str, facts: Callable[[], list[str]], *, anyway: bool = False) -> bool:
        """Compare if the next update is 1, 2, 4, 8, ...; return whether ranks have compared.

        If a rank has left out a step, the ranks meet here with different updates, and all raise. With
        replicas ranks compare each time, unless the host would have to wait for an accelerator.

        Args:
            action: a verb for what this rank is about to do with that update: "make".
            anyway: compare before all other updates, too.
            facts, Raises, Collective, Cost: as `before_update`.
        """
        update = self.updates + 1
        anyway |= self.replicas is not None and self.replicas.control_device.type == "cpu"
        alone = self.comm.world_size == 1 and self.replicas is None
        compares = not alone and (anyway or update & self.updates == 0)  # n & (n - 1) is 0 for powers of 2
        if compares:
            action = f"{action} update {update} of {self.what}"
            with self.preparing(action, CHECK, self.replicas) as found:
                found += facts()
        return compares

    def facts(self) -> list[str]:
        """The fact whether this rank has lost an update, for networks without an alarm.

        Raises:
            RuntimeError: an update was lost, and all ranks know.
        """
        self.check_nothing_lost()
        lost = "".join(self.lost.values())
        return [Fact(f"an update lost by {lost}" if lost else "no update lost", LOAD)]

    def ring(self, error: Exception) -> None:
        """Note that this owner's local optimizer raised, and ring the alarm before new values are sent."""
        self.lost[self.comm.rank] = f"{type(error).__name__}: {error}"
        if self.alarm is not None:
            self.alarm.ring(self.lost[self.comm.rank], self.updates)

    def after_update(self, owners: Iterable[int]) -> None:
        """Note the alarms that have arrived before the new values.

        If the local optimizers of all owners raised, no rank has made the update, so none is lost: the
        unsharded optimizer would have raised, too.
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
        # Without an alarm only this rank knows. Raising alone would leave the others waiting, so ranks find
        # out when they compare `facts`.
        if self.lost and self.alarm is not None:
            rank, error = min(self.lost.items())
            raise RuntimeError(
                f"rank {self.comm.rank}: in update {self.updates} of {self.what} the local optimizer of rank "
                f"{rank} raised {error}. The other ranks have made that update; for the parameters that rank "
                f"{rank} owns it is lost. {LOAD}"
            )

    def note_cut_off(self, action: str) -> None:
        """Note that the network failed while ranks were agreeing whether all can load."""
        self.uncertain = (
            f"rank {self.comm.rank} was to {action}, and was cut off while ranks agreed that all can. This "
            "rank has its old state; others may have loaded the new one, and training on would mix the two. "
            "Load a sharded checkpoint with its parameters, or start again."
        )

    def note_loaded(self, rounded: int) -> None:
        """Note that all ranks have loaded a state, so that no earlier update is lost any more.

        Args:
            rounded: the number of parameters, from the first, whose start values ranks do not compare.
        """
        self.lost = {}
        self.compared = rounded  # a rank may also have loaded other parameters

    def note_partial_call(self, call: str, failed: Sequence[int]) -> None:
        """Note that a call of the local optimizer's class raised on these ranks and not on the others."""
        self.uncertain = (
            f"rank {self.comm.rank}: {call} of {self.what} raised on ranks {[*failed]} and not on the "
            "others, so no unsharded optimizer could have these parameters and this state. Load a sharded "
            "checkpoint with its parameters, or start again."
        )

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """A context for loading parameters and state: it ends the uncertainty that a failed load has left."""
        before, self.uncertain = self.uncertain, ""
        try:
            yield
        except BaseException:
            self.uncertain = self.uncertain or before
            raise
