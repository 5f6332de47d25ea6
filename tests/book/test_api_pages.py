"""The reference in book/api/ has every public name, once, with its chapter; docstrings become its text."""

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest

import zero_ref
import zero_ref.lab
import zero_ref.plan
import zero_ref.simulator
from zero_ref.simulator.options import Option, options_of
from zero_ref.simulator.scenario import Scenario
from zero_ref_course.editions import chapters_in

BOOK = Path(__file__).parents[2] / "book"
NOTEBOOKS = BOOK.parent / "notebooks"

NOT_FOR_READERS = {
    "zero_ref.plan.partition": {"OfEachRank", "check_world_size", "round_up"},
    "zero_ref.plan.choice": {"may_cut", "rule_named"},
    "zero_ref.plan.rules": {"elements", "elements_if_trainable"},
    "zero_ref.plan.layout": {"end_to_end"},
    "zero_ref.comm.agreement": {"RanksLostError", "Agreement", "facts_of_fields"},
    "zero_ref.comm.collectives": {"Observable", "AllOf", "PendingCall", "Then", "ToBroadcast"},
    "zero_ref.comm.process_group": {"global_ranks"},
    "zero_ref.simulator.stage_3": {"Cut", "Unit"},
    "zero_ref.simulator.ledger": {"check_fits", "check_stage", "itemsize_of"},
    "zero_ref.simulator.memory": {"StateBytes", "costs", "offloaded", "whole_bytes"},
    "zero_ref.simulator.messages": {
        *("Message", "MessagesByParam", "broadcasts_of", "messages_of", "new_parameters"),
    },
    "zero_ref.simulator.operations": {
        "forward_and_backward",
        "passes_before",
        "reduction_of",
        "shared_out",
        "shares_of",
    },
    "zero_ref.simulator.options": {
        *("Option", "OptionField", "check_options", "explained", "from_options", "listed", "options_of"),
        *("used_values", "values_of", "words_of"),
    },
    "zero_ref.simulator.layers": {"Weights", "alike", "is_of_experts", "weights_of"},
    "zero_ref.simulator.configuration": {"refuse_other"},
    "zero_ref.simulator.traced": {"Rule", "TracedKept", "TracedLayer", "TracedPass", "TracedProduct"},
    "zero_ref.lab.built": {"adapt", "built"},
    "zero_ref.lab.tracing": {"lengths_of"},
    "zero_ref.simulator.timeline": {"covered_ms"},
    "zero_ref.lab.compare": {"ProgressFile"},
    "zero_ref.lab.outcome": {"as_json", "environment"},
    "zero_ref.lab.dry_run": {"TrainScenario", "print_prediction"},
    "zero_ref.lab.settings": {"as_toml", "read_settings", "settings_of"},
    "zero_ref.lab.simulated_checkpoints": {"passages", "checkpoints_as_json", "print_checkpoints"},
    "zero_ref.lab.simulated": {
        *("Row", "as_json", "cluster_named", "in_words", "print_heading", "print_runs"),
    },
    "zero_ref.lab.searched": {"as_json", "print_found"},
    "zero_ref.lab.config": {
        *("add_run_arguments", "add_demo_arguments", "check_memory", "config_for", "config_from"),
        *("keeps_masters", "least_bytes", "shard_saves", "strategies_of"),
    },
    "zero_ref.lab.own": {"OwnLoop", "OwnTrainable"},
    "zero_ref.lab.source": {"Source", "without_docstrings"},
    "zero_ref.lab.stage_3": {"load_whole", "shard", "whole"},
    "zero_ref.lab.strategies": {"BehindAStep", "Observed", "Sharded", "Stair"},
    "zero_ref.lab.meter": {"gather_from_ranks", "loopback_is_private", "memory_of", "raise_loopback"},
    "zero_ref.lab.model": {"Attention", "Block"},
    "zero_ref.lab.train": {
        "held_out_loss",
        "learning_rate",
        "main",
        "make_parser",
        "Prepared",
        "print_now_and_then",
    },
    "zero_ref.lab.checkpoints": {
        *("Checkpoints", "Losses", "ShardedSaves", "WholeFile", "check_notes", "checkpoints_for"),
        "read_checkpoint",
    },
}
"""Names that modules share with each other: public among them, and of no use to a reader."""

MODULES_NOT_FOR_READERS = {
    "zero_ref.lab.advised",
    "zero_ref.lab.demo",
    "zero_ref.lab.noted_run",
    "zero_ref.lab.on_meta",
    "zero_ref.lab.report",
    "zero_ref.lab.widgets",
}


def _load_extension() -> ModuleType:
    pytest.importorskip("sphinx")
    sys.path.insert(0, str(BOOK / "_ext"))
    try:
        return importlib.import_module("api")
    finally:
        sys.path.remove(str(BOOK / "_ext"))


api = _load_extension()


def public_names(module: ModuleType) -> set[str]:
    """`__all__`; without one, the functions and classes that are defined there and have no underscore."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, thing in vars(module).items()
            if (inspect.isfunction(thing) or inspect.isclass(thing))
            and thing.__module__ == module.__name__
            and not name.startswith("_")
        ]
    return set(names) - NOT_FOR_READERS.get(module.__name__, set())


def modules_of_reference() -> list[str]:
    """The modules of which all is shown: those of the plan, of the simulator, of the lab."""
    names = ["zero_ref.local_sgd.averaging"]
    names += [f"zero_ref.comm.{name}" for name in ("agreement", "collectives", "process_group", "pairwise")]
    for package in (zero_ref.plan, zero_ref.simulator, zero_ref.lab):
        names += [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    return [
        name
        for name in names
        if not name.rpartition(".")[2].startswith("_") and name not in MODULES_NOT_FOR_READERS
    ]


# ------------------------------------------------------------------------------------------ what is there


def test_every_name_of_the_package_has_its_entry():
    assert {f"zero_ref.{name}" for name in zero_ref.__all__} - set(api.shown()) == set()


@pytest.mark.parametrize("name", modules_of_reference())
def test_every_public_name_of_a_module_has_its_entry(name):
    # A name that is imported from zero_ref has its entry there.
    shown = {f"{api.load(entry).__module__}.{entry.rpartition('.')[2]}" for entry in api.shown()
             if hasattr(api.load(entry), "__module__")} | set(api.shown())  # fmt: skip
    missing = {
        public for public in public_names(importlib.import_module(name)) if f"{name}.{public}" not in shown
    }
    assert not missing, (
        f"{name} has new public names {sorted(missing)}: "
        "give each a line in a page of book/api/, or an underscore."
    )


def test_every_entry_is_a_name_that_exists_and_says_what_it_gives():
    for entry in api.shown():
        thing = api.load(entry)
        assert isinstance(thing, api.VALUES) or inspect.getdoc(thing), f"{entry} has no docstring"


def test_what_is_not_for_readers_exists_and_is_not_shown():
    for module, names in NOT_FOR_READERS.items():
        for name in names:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name} is gone"
            assert f"{module}.{name}" not in api.shown()


def test_everything_that_docstrings_may_name_leads_to_an_entry():
    for target in api.index_of(api.shown()).values():
        assert target in api.shown() or target.rpartition(".")[0] in api.shown()


# -------------------------------------------------------------------------------------------- and where


def test_every_entry_has_its_chapter():
    without = [entry for entry in api.shown() if entry not in api.CHAPTER_OF and not _has_module(entry)]
    assert not without, f"CHAPTER_OF in book/_ext/api.py does not say where {without} are taught"


def _has_module(entry):
    return entry.rpartition(".")[0] in api.CHAPTER_OF


def test_the_chapters_in_the_table_are_there_and_so_are_the_names():
    for name, number in api.CHAPTER_OF.items():
        if number is not None:
            assert (NOTEBOOKS / f"{api.chapter_file(number).rpartition('/')[2]}.ipynb").is_file()
        if not any(entry == name or entry.startswith(f"{name}.") for entry in api.shown()):
            owner, _, member = name.rpartition(".")
            assert hasattr(api.load(owner), member), f"nothing in the reference is called {name}"


def pages_of_chapter(number):
    taught = {name for name in [*api.shown(), *api.CHAPTER_OF] if api.chapter_of(name) == number}
    shown = api.shown()
    return {shown[name] if name in shown else shown.get(name.rpartition(".")[0]) for name in taught} - {None}


@pytest.mark.parametrize("number", sorted(int(path.stem[:2]) for path in chapters_in(NOTEBOOKS)))
def test_a_chapter_links_only_to_pages_of_the_reference_that_name_it(number):
    notebook = json.loads((BOOK.parent / f"{api.chapter_file(number)[1:]}.ipynb").read_text(encoding="utf-8"))
    last = "".join(notebook["cells"][-1]["source"])
    linked = set(re.findall(r"\(\.\./book/api/(\w+)\.md\)", last))
    assert linked <= pages_of_chapter(number)


# ------------------------------------------------------------------------------------------- docstrings


def test_the_examples_of_the_extension_hold():
    assert doctest.testmod(api).failed == 0


def test_code_becomes_code_and_a_known_name_a_link():
    link = {"even": "zero_ref.even"}.get
    assert api.prose_to_rest("As `even`, or `even()`; not `odd`.", link) == (
        "As :py:obj:`even <zero_ref.even>`, or :py:obj:`even() <zero_ref.even>`; not ``odd``."
    )


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("s*b*h bytes, 2**-7", r"s\*b\*h bytes, 2\*\*-7"),
        ("predicted | measured", r"predicted \| measured"),
        ("clip_grad_norm_ of torch", r"clip_grad_norm\_ of torch"),
        ("the `Call`s, un`do`ne", r"the ``Call``\ s, un\ ``do``\ ne"),
        ("`a\n b` on two lines", "``a b`` on two lines"),
    ],
)
def test_prose_means_the_same_as_before(text, rest):
    assert api.prose_to_rest(text) == rest


def test_a_section_may_begin_on_the_line_of_its_name():
    lines = ["Args: as `even`, and", "    kinds: of tensor,", "        or None.", "Raises, Cost: as `even`."]
    assert api.to_rest(lines) == [
        ":Args:", "   as ``even``, and", "", "   ``kinds``", "      of tensor,", "      or None.", "",
        ":Raises, Cost:", "   as ``even``.", "",
    ]  # fmt: skip


def test_an_argument_is_no_link_even_if_something_has_its_name():
    def play(schedule: object) -> None:
        """Plays a `schedule`."""

    index = {"zero_ref.simulator.schedule.schedule": "zero_ref.simulator.schedule.schedule"}
    play.__module__ = "zero_ref.simulator.schedule"
    link = partial(api.link_from, "zero_ref.simulator.schedule.play", play, index)
    assert link("schedule") is None
    play.__module__, play.__signature__ = play.__module__, inspect.Signature()
    assert link("schedule") == "zero_ref.simulator.schedule.schedule"


def test_the_reference_has_every_option_of_a_dataclass_and_its_plain_type() -> None:
    lines = api.with_options(Scenario, (inspect.getdoc(Scenario) or "").split("\n"))
    told = {found[1] for line in lines if (found := re.match(r"    (\w+): \S", line))}
    assert {one.path[0] for one in options_of(Scenario)} <= told
    assert lines.index("Args:") < lines.index("    batch: sequences a rank.") < lines.index("Raises:")

    def made(batch: Annotated[int, Option("sequences a rank")] = 1) -> None: ...

    api.plain_types(None, made, False)
    assert made.__annotations__ == {"batch": int, "return": type(None)}
