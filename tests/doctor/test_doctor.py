"""The doctor's parts that start no processes: the plain loop, what noise explains, mistakes, the report."""

import functools
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zero_ref import cli, doctor
from zero_ref.doctor import causes
from zero_ref.doctor.causes import MISTAKES, Causes, variants_for
from zero_ref.doctor.compare import Where, bounds_of, first_departure
from zero_ref.doctor.diagnose import NOISY_RUNS, _Doctor, plain_maker, shape_for
from zero_ref.doctor.files import InFile, imported, options_from
from zero_ref.doctor.mistake import Mistake, Patient, explains
from zero_ref.doctor.model import Model, Shape, batch_for, layers_of
from zero_ref.doctor.on_rank import Case, Refused, added_options, is_deliberate
from zero_ref.doctor.plain import Noise, PlainLoop
from zero_ref.doctor.program import as_program
from zero_ref.doctor.report import Departure, NotTried, Raised, Report
from zero_ref.doctor.trials import make_trials

OPTIONS = {"lr": 0.05, "weight_decay": 0.125, "eps": 2.0**-20}


def make(model):
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


def case_of(name, ranks=(2, 2)):
    shape, optimizer = shape_for(make, 0)
    trial = next(trial for trial in make_trials(5, shape) if trial.name == name)
    divisor = ranks[0] * ranks[1] if trial.elsewhere else ranks[0]
    return Case(trial, make, seed=0, data_ranks=divisor, added_options=added_options(optimizer))


def patient_of(case, observed, ranks=(2, 2), masters=False):
    """The patient, or None if nothing departs."""
    model = Model(case.trial.shape, 0)

    def loop(noise=None):
        return PlainLoop(case, model, make, ranks, masters=masters, noise=noise).play()

    expected = loop()
    bounds = bounds_of(expected, [loop(Noise(run)) for run in range(NOISY_RUNS)])
    where = first_departure(observed, expected, bounds)
    if where is None:
        return None
    return Patient(case, model, make, ranks, masters, observed, expected, bounds, where)


# ------------------------------------------------------------------------------------- model and data


@pytest.mark.parametrize("shape", [Shape(), Shape(tied=True), Shape(mixed=True), Shape(quiet=2.0**-41)])
def test_sums_of_gradients_are_exact_in_any_order(shape):
    ranks, micro = 4, 3
    sums = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        model = Model(shape, seed=0)
        for number in range(1 if shape.mixed else micro):
            for rank in order:
                model(batch_for(shape, 0, rank, number, ranks)).backward()
        sums.append([param.grad.double() / ranks for param in model.parameters()])
    for one, other in zip(*sums, strict=True):
        assert torch.equal(one, other)
        assert one.any()


def test_ranks_and_batches_have_different_data():
    batches = [batch_for(Shape(), 0, rank, number, 2) for rank in range(2) for number in range(2)]
    for name in layers_of(Shape()):
        inputs = [batch[name][0] for batch in batches]
        assert not any(torch.equal(a, b) for at, a in enumerate(inputs) for b in inputs[at + 1 :])


def test_the_scale_of_a_gradient_shows_in_adams_first_step():
    shape, _ = shape_for(make, 0)
    moved = []
    for factor in (1.0, 2.0):
        model = Model(shape, 0)
        optimizer = make(model)
        (model(batch_for(shape, 0, 0, 0, 1)) * factor).backward()
        optimizer.step()
        moved.append(model.get_submodule("third").weight.detach())
    quiet, loud = (moved[0] - moved[1]).abs()[0], (moved[0] - moved[1]).abs()[1:]
    assert quiet.max() > 0.001
    assert loud.max() < 1e-6


# ------------------------------------------------------------------------------------ the plain loop


def test_noise_is_no_departure():
    case = case_of("accumulation")
    model = Model(case.trial.shape, 0)
    for seed in range(20, 24):  # other orders and bits than those that the bound is made of
        observed = PlainLoop(case, model, make, (2, 2), noise=Noise(seed)).play()
        assert patient_of(case, observed) is None


def test_one_wrong_element_on_one_rank_is_named():
    case = case_of("plain")
    observed = PlainLoop(case, Model(case.trial.shape, 0), make, (2, 2)).play()
    trace = observed[0].traces[1]
    for place, snapshot in enumerate(trace):
        if snapshot.phase == "step" and snapshot.step >= 2:
            values = snapshot.tensors["second.weight"].clone()
            values.view(-1)[7] += 0.01
            trace[place] = replace(snapshot, tensors=snapshot.tensors | {"second.weight": values})
    patient = patient_of(case, observed)
    (place,) = patient.where.places
    assert (patient.where.step, patient.where.phase) == (2, "step")
    assert (place.parameter, place.rank, place.start, place.stop) == ("second.weight", 1, 7, 8)
    assert place.ulps > 1000 * place.allowed_ulps
    assert Causes().of(patient) == ()


def test_of_several_explanations_those_that_suppose_least_are_named(monkeypatch):
    supposed = {"most": 3, "least": 1, "as little": 1, "nothing": None}
    variants = [(says, (Mistake, {"says": says})) for says in supposed]
    monkeypatch.setattr(causes, "variants_for", lambda patient: variants)
    monkeypatch.setattr(causes, "gives", lambda patient, variant: supposed[variant[1]["says"]])
    assert Causes().mistakes(None) == ("least", "as little")


@pytest.mark.parametrize(
    ("name", "ranks", "divisor"), [("plain", (2, 2), 2), ("another world size", (2, 3), 6)]
)
def test_targets_can_be_divided_by_the_number_of_ranks_before_a_load_and_after(
    monkeypatch, name, ranks, divisor
):
    class Refusing(_Doctor):
        def play(self, case, *ranks):
            played.append((ranks, case.data_ranks))
            return Refused("as far as this test goes")

    played = []
    patient = Refusing(case_of("plain"), make, (2, 3), False, None, 1.0, False)
    patient.examine(case_of(name).trial, 2)
    assert played == [(ranks, divisor)]


TRIAL_OF = {
    "OneMicroBatch": "accumulation", "OnlyLastReduced": "accumulation", "ReducedAgain": "accumulation",
    "InterruptedCounts": "exception", "ZeroInPlaceOfNone": "frozen layer",
    "DecaysWithoutGradient": "frozen layer", "FrozenTrains": "frozen layer",
    "MeanOfUsers": "unused on a rank", "UnusedSkipped": "unused on a rank",
    "OldGradient": "unused parameters", "OneUseOfTied": "tied weights", "AddedOptionsLost": "group added",
    "NotScheduled": "scheduler", "BuffersApart": "buffers", "OtherMasters": "mixed dtypes",
}  # fmt: skip
NOT_HERE = {
    *("CutMatrix", "OwnRangeAveraged"),  # AdamW updates each element by itself
    "OptionOfAnotherGroup",  # there is one
    "MastersFromRounded",  # there are none
    "ClippedByAnotherNorm",  # it fits what was observed
}


def trial_of(mistake):
    if mistake.__module__.endswith("clipping"):
        return "clipping"
    return (
        "save and load" if mistake.__module__.endswith("state") else TRIAL_OF.get(mistake.__name__, "plain")
    )


@pytest.mark.parametrize(
    "mistake", [one for one in MISTAKES if one.__name__ not in NOT_HERE], ids=lambda mistake: mistake.__name__
)
def test_each_mistake_departs_and_is_explained_by_itself(mistake):
    case = case_of(trial_of(mistake))
    whole = Model(case.trial.shape, 0)
    right = PlainLoop(case, whole, make, (2, 2)).play()
    bounds = bounds_of(right, [])
    patient = Patient(
        case, whole, make, (2, 2), False, right, right, bounds, at_the_end(case), options={"lr": 0.03}
    )
    assert mistake.applies(patient)
    departing = 0
    for says, chosen in mistake.variants(patient):
        observed = mistake(patient, **chosen).play()
        where = first_departure(observed, right, bounds)
        if where is None:
            continue  # such as a variant of clipping that divides these parameters as they are
        departing += 1
        ill = replace(patient, observed=observed, where=where)
        assert explains(ill, mistake(ill, **chosen).play()) == 0, says
    assert departing


def at_the_end(case):
    """As if the last step departed, so that all steps have been."""
    return Where(0, len(case.trial.steps), "step", ())


@pytest.mark.parametrize("name", ["accumulation", "another world size"])
def test_a_mistake_is_named_among_all(name):
    says = {
        "accumulation": "accumulation keeps only the last micro-batch of a step",
        "another world size": "the optimizer's state, its moments, is reset by loading",
    }[name]
    ranks = (2, 3) if name == "another world size" else (2, 2)
    case = case_of(name, ranks)
    model = Model(case.trial.shape, 0)
    bare = Patient(case, model, make, ranks, False, [], [], [], at_the_end(case))
    mistake, chosen = next(variant for words, variant in variants_for(bare) if words == says)
    patient = patient_of(case, mistake(bare, **chosen).play(), ranks)
    assert Causes().of(patient) == (says,)


def test_a_norm_that_no_mistake_has_is_found_from_the_gradients():
    case = case_of("clipping")
    model = Model(case.trial.shape, 0)
    bare = Patient(case, model, make, (2, 2), False, [], [], [], at_the_end(case))
    scaled = next(one for one in MISTAKES if one.__name__ == "NormMiscounted")
    patient = patient_of(case, scaled(bare, factor=0.3).play())
    assert Causes().of(patient) == (
        "all gradients are clipped by one norm, which is not the norm of all gradients",
    )


def test_values_that_no_rank_updates_are_told_from_a_broadcast_that_was_lost_on_any_number_of_ranks():
    case = case_of("another world size", (2, 3))
    observed = PlainLoop(case, Model(case.trial.shape, 0), make, (2, 3)).play()
    begun = observed[0].traces[0][0].tensors["third.bias"]
    for trace in (trace for part in observed for trace in part.traces):
        for place, snapshot in enumerate(trace):
            if snapshot.phase in ("load", "step"):
                trace[place] = replace(snapshot, tensors=snapshot.tensors | {"third.bias": begun})
    patient = patient_of(case, observed, (2, 3))
    assert Causes().of(patient) == ("no rank has updated third.bias: values of an earlier step stand there",)


# -------------------------------------------------------------------------------------------- the report


def report_with(departures=(), raised=(), not_tried=()):
    tried = (*((one.trial, one.ranks) for one in (*departures, *raised)), ("clipping", 2))
    return Report("mine", (2,), tried, tuple(departures), tuple(raised), tuple(not_tried), {"seed": 0})


@functools.cache
def departed():
    case = case_of("plain")
    bare = Patient(case, Model(case.trial.shape, 0), make, (2, 2), False, [], [], [], at_the_end(case))
    mistake = next(one for one in MISTAKES if one.__name__ == "OwnOnly")
    patient = patient_of(case, mistake(bare).play())
    causes = Causes().of(patient)
    return Departure("plain", 2, patient.where.step, patient.where.phase, patient.where.places, causes)


def test_a_report_says_where_by_how_much_and_why():
    report = report_with([departed()], not_tried=[NotTried("buffers", "left out", (2,))])
    text = str(report)
    assert not report.healthy
    assert "plain: departs in step 0, in backward, on ranks 0, 1 of 2" in text
    assert "first first.weight[0:60] of 60 elements, and 9 others" in text
    assert "ulps, and reordered sums explain" in text
    assert "likely cause: gradients are not reduced: a rank steps with those of its own data alone" in text
    assert "equal to the plain loop: clipping" in text
    assert "buffers: left out" in text
    with pytest.raises(AssertionError, match="likely cause: gradients are not reduced"):
        report.check()


def test_a_departure_without_a_known_cause_says_so():
    assert "departs here, cause unknown" in str(replace(departed(), causes=()))


def test_departures_with_the_same_cause_are_shown_once():
    found = departed()
    text = str(
        report_with([found, replace(found, trial="scheduler"), replace(found, trial="scheduler", ranks=3)])
    )
    assert text.count("likely cause") == 1
    assert "also departs for the same cause, in trials (on ranks): scheduler (2, 3)" in text


def test_of_a_departure_without_a_cause_it_is_said_that_a_simpler_trial_departs():
    found = departed()
    text = str(report_with([found, replace(found, trial="clipping", causes=())]))
    assert "departs here, cause unknown\n  the trial 'plain' departs too: mend that first" in text
    assert "mend that first" not in str(report_with([replace(found, causes=())]))


def test_json_has_what_the_text_has():
    found = departed()
    found = replace(found, places=(replace(found.places[0], ulps=float("inf")), *found.places[1:]))
    read = json.loads(report_with([found]).to_json())
    assert read["healthy"] is False
    (read_back,) = read["departures"]
    assert read_back["places"][0]["parameter"] == "first.weight"
    assert read_back["places"][0]["ulps"] is None
    assert read_back["causes"] == list(found.causes)


def test_junit_has_a_case_for_each_trial():
    raised = Raised("scheduler", 2, 1, "KeyError: 'lr'", "rank 1 raised KeyError\n\x1b[31mtraceback")
    suite = ElementTree.fromstring(
        report_with([departed()], [raised], [NotTried("buffers", "left out", (2,))]).to_junit()
    )
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    assert "departs in step 0" in suite.find("testcase/failure").get("message")


def test_a_report_without_departures_is_healthy():
    report = report_with()
    report.check(strict=True)
    assert str(report).startswith("mine on 2 ranks: healthy")


def test_a_report_in_which_nothing_was_tried_is_not_healthy():
    report = replace(report_with(not_tried=[NotTried("clipping", "it has no norm", (2,), True)]), tried=())
    assert str(report).startswith("mine on 2 ranks: nothing could be tried")
    with pytest.raises(AssertionError, match="clipping: it has no norm"):
        report.check()


def test_a_program_that_raises_is_not_said_to_depart():
    report = report_with(raised=[Raised("scheduler", 2, 1, "KeyError: 'lr'", "rank 1 raised KeyError")])
    assert str(report).startswith("mine on 2 ranks: raises or hangs")


def test_a_strict_check_fails_for_what_the_program_refuses_and_not_for_what_was_left_out():
    report_with(not_tried=[NotTried("buffers", "left out", (2,))]).check(strict=True)
    refused = report_with(not_tried=[NotTried("buffers", "it has no wrapper", (2, 3), refused=True)])
    refused.check()
    with pytest.raises(AssertionError, match="refused buffers, and the check is strict"):
        refused.check(strict=True)


def test_a_tensor_that_is_not_there_is_said_to_be_missing():
    case = case_of("plain")
    observed = PlainLoop(case, Model(case.trial.shape, 0), make, (2, 2)).play()
    cut = {"first.weight": torch.zeros(30), "second.bias": torch.full((5,), float("nan"))}
    trace = observed[0].traces[1]
    trace[-1] = replace(trace[-1], tensors=trace[-1].tensors | cut)
    missing, nan = patient_of(case, observed).where.places
    assert (missing.parameter, missing.observed, missing.stop) == ("first.weight", None, 60)
    found = replace(departed(), places=(missing,))
    assert "rank 1 has no such tensor, or one of another shape: a Program gives whole ones" in str(found)
    assert "\n  nan on rank 1 and not " in str(replace(departed(), places=(nan,)))


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give from_plain= or reference=, and not neither"),
        ({"reference": make, "from_plain": torch.optim.SGD}, "and not both"),
        ({"reference": make, "options": {"lr": 1.0}}, "options= belong to from_plain="),
        ({"reference": make, "ranks": (0,)}, r"ranks is \(0,\)"),
        ({"reference": make, "ranks": ()}, r"ranks is \(\)"),
        ({"reference": make, "without": ["clip"]}, "there is no trial 'clip'. There are: plain, "),
        ({"reference": make, "steps": 2}, "steps is 2, and a trial needs at least 3"),
        ({"reference": make, "batch": make}, "leave batch= out"),
        ({"reference": lambda model: (make(model), model)}, "gave a tuple: return its optimizer"),
        ({"from_plain": torch.optim.SGD, "options": {"lr": -1.0}}, "the plain optimizer cannot be made"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(arguments, message):
    with pytest.raises(ValueError, match=message):
        doctor.diagnose(make, **arguments)


def test_a_program_with_a_model_of_its_own_needs_data():
    with pytest.raises(ValueError, match=r"give batch=, of \(rank, number\), and loss="):
        doctor.diagnose(lambda: None, reference=make)


def test_an_optimizer_that_takes_only_matrices_gets_only_matrices():
    shape, _ = shape_for(plain_maker(torch.optim.Muon, {"lr": 0.05}, None), seed=0)
    assert shape.matrices_only
    assert all(param.dim() == 2 for param in Model(shape, 0).parameters())


@pytest.mark.parametrize("returned", [3, (make,), (torch.nn.Linear(1, 1),)])
def test_what_a_factory_must_return_is_said(returned):
    with pytest.raises(TypeError, match=r"return an optimizer, \(optimizer, wrapper\) or a doctor\.Program"):
        as_program(returned, torch.nn.Linear(2, 2), None)


def test_a_raise_statement_is_told_from_an_operation_that_failed():
    def refuses():
        raise ValueError(
            "only float32",
        )

    def fails():
        torch.zeros(2) @ torch.zeros(3)

    for function, deliberate in ((refuses, True), (fails, False)):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            function()
        assert is_deliberate(caught.value) is deliberate


# ---------------------------------------------------------------------------------------- the command


def test_the_help_names_every_trial(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    named = re.search(r"Trials: ([^.]*)\.", " ".join(capsys.readouterr().out.split()))
    assert named[1].split(", ") == list(doctor.TRIALS)


def test_the_page_names_every_mistake_that_the_doctor_knows():
    page = Path(__file__).parents[2] / "book" / "doctor.md"
    _, _, after = page.read_text("utf-8").partition("## The mistakes that it knows")
    listed = re.findall(r"^- (.*)$", after.split("\n## ")[0], re.M)
    assert listed == [mistake.says for mistake in MISTAKES]


def test_options_are_literals_or_text():
    assert options_from(["lr=1e-3", "betas=(0.9, 0.95)", "mode=max"]) == {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "mode": "max",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.py", "--reference", "plain"], "'mine.py' is not FILE.py:NAME"),
        (["mine.py:absent", "--reference", "plain"], "has no function absent. It has: sharded, plain."),
        (["mine.py:sharded"], "one of the arguments --reference --from-plain is required"),
        (["mine.py:sharded", "--from-plain", "torch.optim.Adamw"], "cannot be imported"),
        (["mine.py:sharded", "--from-plain", "torch.optim.AdamW", "--options", "lr"], "is not NAME=VALUE"),
        (
            ["mine.py:sharded", "--reference", "plain", "--options", "lr=1"],
            "--options belong to --from-plain",
        ),
        (["mine.py:sharded", "--reference", "plain", "--without", "x"], "there is no trial 'x'"),
        (["none.py:sharded", "--reference", "plain"], "No such file"),
    ],
)
def test_a_wrong_command_is_answered_with_code_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def sharded(model): ...\ndef plain(model): ...\n")
    try:
        code = cli.main(["doctor", *words])
    except SystemExit as ended:  # by argparse
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_class_is_named_by_its_module():
    assert imported("torch.optim.AdamW") is torch.optim.AdamW
    with pytest.raises(ValueError, match="no optimizer class"):
        imported("torch.__version__")


def test_a_factory_in_a_file_keeps_its_signature(tmp_path):
    (tmp_path / "mine.py").write_text("def sharded(model): ...\n")
    found = InFile.of(f"{tmp_path / 'mine.py'}:sharded")
    assert list(found.__signature__.parameters) == ["model"]
