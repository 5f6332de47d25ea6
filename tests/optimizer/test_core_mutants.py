"""The table of `core_mutants.py` fits the core: each mistake can be made, and its tests are there."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from core_mutants import MUTANTS, ROOT, Mutant, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_can_be_made_in_one_place(mutant: Mutant) -> None:
    text = (ROOT / "zero_ref" / mutant.file).read_text()
    wrong = mutated(text, mutant)
    assert wrong != text
    ast.parse(wrong)
    files = [test for test in mutant.tests if test.endswith(".py")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_every_folder_of_the_core_has_mistakes_of_its_own() -> None:
    folders = Counter(mutant.file.split("/")[0].removesuffix(".py") for mutant in MUTANTS)
    assert folders.keys() >= {"plan", "comm", "shard", "optimizer", "backward", "state", "clip", "local_sgd"}
    assert len(MUTANTS) >= 30
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_text_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs 2 times"):
        mutated("a a", Mutant("twice", "clip.py", "a", "b", ()))
