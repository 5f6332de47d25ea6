"""Contenders take turns, here on a single rank and on no clock."""

from __future__ import annotations

import random

import pytest

from benchmarks import rounds
from benchmarks.rounds import WARM_UP, Case, take_turns
from zero_ref.lab import meter


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of one rank that a process is by itself."""
    monkeypatch.setattr(rounds.dist, "barrier", lambda: None)
    monkeypatch.setattr(rounds.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(meter, "gather_from_ranks", lambda value: [value])


@pytest.mark.usefixtures("alone")
def test_every_case_comes_once_in_each_round_and_the_first_do_not_count() -> None:
    ran: list[str] = []
    cases = {
        name: Case(
            lambda name=name: ran.append(name),  # type: ignore[misc]
            before=lambda name=name: ran.append(f"before {name}"),  # type: ignore[misc]
            after=lambda name=name: ran.append(f"after {name}"),  # type: ignore[misc]
        )
        for name in "abc"
    }
    taken = take_turns(cases, rounds=4)
    assert all(len(one.wall_ms) == len(one.cpu_ms) == 4 for one in taken.values())
    steps = 3 * 3 * (WARM_UP + 4)
    turns = [ran[at : at + 3] for at in range(0, steps, 3)]
    assert all(turn == [f"before {turn[1]}", turn[1], f"after {turn[1]}"] for turn in turns)
    orders = [tuple(turn[1] for turn in turns[at : at + 3]) for at in range(0, len(turns), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1, "every round had the same order"
    assert orders == [tuple(order) for order in _drawn("abc", WARM_UP + 4)]


def _drawn(names: str, number: int) -> list[list[str]]:
    """Return the orders that every rank draws, which depend only on the seed and the names."""
    drawn = random.Random(0)
    return [drawn.sample(list(names), len(names)) for _ in range(number)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("private", "counter"), [(True, "wire_bytes"), (False, "sent_bytes")])
def test_bytes_are_counted_on_loopback_only_if_it_is_private(
    monkeypatch: pytest.MonkeyPatch, private: bool, counter: str
) -> None:
    sent = {"wire_bytes": 0, "sent_bytes": 0}

    def run() -> None:
        sent[counter] += 1000

    monkeypatch.setattr(meter, "loopback_is_private", lambda: private)
    for name in sent:
        monkeypatch.setattr(meter, name, lambda name=name: sent[name])
    assert take_turns({"a": Case(run)}, rounds=1)["a"].wire_bytes == 1000
    assert rounds.wire_counter() == (rounds.INTERFACE if private else rounds.CONNECTIONS)
