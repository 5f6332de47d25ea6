"""The doctor's parts that start no processes: model, plain loop, what rounding explains, the report."""

import functools
import json
import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import partial

import pytest
import torch

from zero_ref import cli, doctor
from zero_ref.doctor.all_data import shares
from zero_ref.doctor.compare import bounds_of, first_departure
from zero_ref.doctor.diagnose import NOISY_RUNS, _Doctor, plain_maker, shape_for, told
from zero_ref.doctor.files import InFile, imported, options_from
from zero_ref.doctor.model import Model, Shape, batch_for
from zero_ref.doctor.on_rank import Case, added_options, is_deliberate
from zero_ref.doctor.plain import Noise, Part, PlainLoop
from zero_ref.doctor.program import as_program
from zero_ref.doctor.reading import Patient, begins, read
from zero_ref.doctor.report import Departure, NotTried, Raised, Report
from zero_ref.doctor.trials import make_trials, together
from zero_ref.doctor.weights import meaning, solve, times
from zero_ref.lab.ranks import RankError

OPTIONS = {"lr": 0.05, "weight_decay": 0.125, "eps": 2.0**-20}


def make(model):
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


def case_of(name):
    shape, optimizer = shape_for(make, 0)
    trial = next(trial for trial in make_trials(5, shape) if trial.name == name)
    return Case(trial, make, seed=0, added_options=added_options(optimizer))


def loop_of(case, kind=PlainLoop, ranks=(2, 2), **settings):
    return kind(case, Model(case.trial.shape, 0), make, ranks, **settings)


def departure_of(case, observed, ranks=(2, 2)):
    """Where the traces depart, and what is read off them; None if nothing departs."""
    expected = loop_of(case, ranks=ranks).play()
    noisy = [loop_of(case, ranks=ranks, noise=Noise(run)).play() for run in range(NOISY_RUNS)]
    bounds = bounds_of(expected, noisy)
    where = first_departure(observed, expected, bounds)
    if where is None:
        return None
    loop = partial(loop_of, case, ranks=ranks)
    patient = Patient(case.trial.steps, loop, observed, expected, bounds, where)
    where = begins(patient)
    return where, read(patient, where)


# ------------------------------------------------------------------------------------- model and data


@pytest.mark.parametrize("seed", range(4))
def test_every_element_is_loud_in_the_last_step_and_quiet_ones_lie_in_every_tensor_before(seed):
    shape, _ = shape_for(make, 0)
    steps = [batch_for(shape, seed, "plain", step, 5, 0, 0) for step in range(5)]
    for layer in steps[0]:
        first, last = (step[layer]["weight"].abs() for step in (steps[0], steps[-1]))
        assert last.min() >= 2.0**-3
        assert (first < shape.eps).any() or first.numel() < 10
        assert (first >= 2.0**-3).any()
    firsts = torch.cat([one["weight"].flatten() for one in steps[0].values()])
    assert 0.3 < (firsts.abs() < shape.eps).float().mean() < 0.5


def test_the_gradient_is_the_batch_whatever_the_values_are():
    model, batch = Model(Shape(), seed=5), batch_for(Shape(), 0, "plain", 0, 5, 1, 0)
    model(batch).backward()
    for name, factors in batch.items():
        assert torch.equal(model.get_submodule(name).weight.grad, factors["weight"])
        assert torch.equal(model.get_submodule(name).bias.grad, factors["bias"])


def test_ranks_micro_batches_and_steps_have_different_data():
    keys = [(step, rank, micro) for step in range(2) for rank in range(2) for micro in range(2)]
    drawn = [batch_for(Shape(), 0, "plain", step, 5, *of)["tiny"]["weight"] for step, *of in keys]
    assert not any(torch.equal(a, b) for at, a in enumerate(drawn) for b in drawn[at + 1 :])


def test_the_scale_of_a_quiet_gradient_shows_in_adams_first_step():
    shape, _ = shape_for(make, 0)
    batch, moved = batch_for(shape, 0, "plain", 0, 5, 0, 0), []
    for factor in (1.0, 2.0):
        model = Model(shape, 0)
        optimizer = make(model)
        (model(batch) * factor).backward()
        optimizer.step()
        moved.append(model.get_submodule("first").weight.detach())
    quiet = batch["first"]["weight"].abs() < shape.eps
    assert (moved[0] - moved[1]).abs()[quiet].min() > 1e-4
    assert (moved[0] - moved[1]).abs()[~quiet].max() < 1e-6


# ----------------------------------------------------------------------------- one process with all data


def mean_loss(model, batch):
    return (model(batch) ** 2).mean()


def test_batches_of_different_sizes_count_by_their_sizes_in_one_process():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    batches = [torch.randn(rows, 4) for rows in (1, 3, 4)]
    assert shares(model, mean_loss, batches) == pytest.approx([1 / 8, 3 / 8, 4 / 8], abs=1e-3)


@pytest.mark.parametrize(
    ("loss", "sizes"),
    [
        (mean_loss, (3, 3)),
        (lambda model, batch: model(batch).square().sum(), (1, 3)),
        (lambda model, batch: torch.logsumexp(model(batch).flatten(), 0), (2, 3)),
        (lambda model, batch: mean_loss(model, batch["x"]), (2, 3)),
    ],
    ids=["equal sizes", "a sum", "no mean", "no such batch"],
)
def test_otherwise_all_batches_count_alike(loss, sizes):
    torch.manual_seed(0)
    assert shares(torch.nn.Linear(4, 2), loss, [torch.randn(rows, 4) for rows in sizes]) is None


# ------------------------------------------------------------------------------------ what rounding explains


@pytest.mark.parametrize("name", ["accumulation", "clipping", "mixed dtypes"])
def test_noise_is_no_departure(name):
    case = case_of(name)
    for seed in range(20, 24):  # other bits than those that the bound is made of
        assert departure_of(case, loop_of(case, noise=Noise(seed)).play()) is None


def test_a_gradient_that_cancels_has_a_bound_of_its_own():
    """Where the ranks' gradients add up to 0 or to its last bit, Adam makes a whole step of it, or none."""

    class Cancelled(PlainLoop):
        off = 0.0

        def reduced(self, name, step):
            if name == "first.bias":
                for of_rank, sign in zip(self.local, (1, -1)):
                    of_rank[0][name].view(-1)[3] = 5.0 * sign
            grad = super().reduced(name, step)
            if name == "first.bias" and self.off:
                grad.view(-1)[3] += self.off
            return grad

    case = case_of("plain")
    expected = loop_of(case, Cancelled).play()
    bounds = bounds_of(expected, [loop_of(case, Cancelled, noise=Noise(run)).play() for run in range(6)])
    loop = loop_of(case, Cancelled)
    loop.off = 1e-6
    assert first_departure(loop.play(), expected, bounds) is None
    assert bounds[0][4, "step"]["first.bias"].view(-1)[2] < 1e-4


def changed(observed, name, change, steps=range(9), ranks=(0, 1)):
    """Traces in which a function has changed the values of one parameter."""
    for rank in ranks:
        trace = observed[0].traces[rank]
        for place, one in enumerate(trace):
            if one.phase == "step" and one.step in steps:
                trace[place] = replace(one, tensors=one.tensors | {name: change(one.tensors[name].clone())})
    return observed


def test_one_wrong_element_on_one_rank_is_named():
    def change(values):
        values.view(-1)[7] += 0.01
        return values

    case = case_of("plain")
    where, _ = departure_of(case, changed(loop_of(case).play(), "second.weight", change, range(2, 9), [1]))
    (place,) = where.places
    assert (where.step, where.phase) == (2, "step")
    assert (place.parameter, place.rank, place.start, place.stop) == ("second.weight", 1, 7, 8)
    assert place.observed - place.expected == pytest.approx(0.01, rel=1e-3)
    assert place.allowed < 1e-5
    assert place.elements == "element 7 of 45"


def test_a_tensor_that_is_not_there_is_said_to_be_missing():
    case = case_of("plain")
    observed = changed(loop_of(case).play(), "first.weight", lambda values: values[:5], [4], [1])
    nan = changed(observed, "second.bias", lambda values: values * torch.nan, [4], [1])
    missing, nan = departure_of(case, nan)[0].places
    assert (missing.parameter, missing.observed, missing.stop) == ("first.weight", None, 60)
    found = replace(departed(), places=(missing, nan))
    assert "rank 1 has no such tensor, or one of another shape: a Program gives whole ones" in str(found)
    assert "rank 1 has nan and not " in str(found)


# ------------------------------------------------------------------------------- what is read off the numbers


def test_the_weights_of_columns_of_all_sizes_are_found():
    sizes = 2.0 ** torch.arange(-40, 8, 2)
    columns = [torch.randn(24, generator=torch.Generator().manual_seed(n)) * sizes for n in range(3)]
    seen = 0.5 * columns[0] - 2 * columns[2]
    assert solve(columns, seen).tolist() == pytest.approx([0.5, 0.0, -2.0], abs=1e-5)
    assert solve(columns, seen + sizes) is None
    assert solve(columns, torch.ones(3)) is None


HALF = torch.full((2, 3), 0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({0: 2 * HALF, 1: 2 * HALF}, "2 times the right gradient, which is the number of ranks"),
        ({0: HALF / 3, 1: HALF / 3}, "which is 1 / the number of micro-batches"),
        ({0: HALF * 1.7}, "1.7 times the right gradient"),
        ({0: -HALF}, "its sign is turned"),
        ({0: HALF * torch.tensor([0, 0, 1.0])}, "only the last micro-batch is there"),
        ({0: HALF * torch.tensor([[0], [2.0]])}, "the gradient of rank 1 alone"),
        (
            {0: HALF * torch.tensor([[2.0], [0]]), 1: HALF * torch.tensor([[0], [2.0]])},
            "each rank has the gradient of its own data alone: it is not reduced",
        ),
        ({0: HALF * torch.tensor([[1.0], [3.0]])}, "other weights than in one process with all data"),
        ({0: HALF, 1: 2 * HALF}, "ranks have different gradients"),
        # rank 0 did not use the parameter
        (
            {0: HALF * torch.tensor([[torch.nan], [2.0]])},
            "2 times the right gradient, which is the number of ranks",
        ),
    ],
)
def test_weights_are_put_into_words(seen, says):
    assert meaning(seen, HALF).endswith(says)


def test_a_factor_is_never_called_by_a_count_that_does_not_give_it():
    assert times(3.0, {"ranks": 2, "micro-batches": 5}) == "3 times the right gradient"
    assert "root" in times(2**0.5, {"ranks": 2})


def test_of_two_steps_a_shadow_tells_which_is_at_fault():
    """Values that are those of the gradients as they were depart in backward, others in step."""

    class Summed(PlainLoop):
        def reduced(self, name, step):
            grad = super().reduced(name, step)
            return None if grad is None else 2 * grad

    class Longer(PlainLoop):
        def update(self, step):
            before = self.values()
            super().update(step)
            with torch.no_grad():
                for name, param in self.named().items():
                    param += param - before[name]

    case = case_of("plain")
    where, hints = departure_of(case, loop_of(case, Summed).play())
    assert (where.phase, where.places[0].kind) == ("backward", "gradient")
    assert "which is the number of ranks" in hints[0]
    where, hints = departure_of(case, loop_of(case, Longer).play())
    assert (where.phase, where.places[0].kind) == ("step", "value")
    assert hints == ("in first.weight: they moved 2 times as far as they should",)


class Unshown(PlainLoop):
    """Its gradients cannot be seen, as under a wrapper that keeps them, and `change` makes them others."""

    def update(self, step):
        grads = {name: self.reduced(name, step) for name in self.named()}
        self.change(step)
        self.before = grads
        super().update(step)

    def change(self, step):
        pass

    def change_each(self, change):
        for name, param in self.named().items():
            param.grad = change(name, param)

    def note(self, step, phase, tensors):
        super().note(step, phase, {} if phase in ("backward", "clip") else tensors)


class UnshownSums(Unshown):
    says = "gradients 2 times as large"

    def change(self, step):
        self.change_each(lambda name, param: 2 * param.grad)


class UnshownLocal(Unshown):
    says = "each rank's own gradients"

    def change(self, step):
        self.change_each(lambda name, param: self.local[self.rank][0][name])


class UnshownNotClipped(Unshown):
    trial, says = "clipping", "gradients that are not clipped"

    def change(self, step):
        self.change_each(lambda name, param: self.reduced(name, step))


class UnshownZeros(Unshown):
    trial, says = "unused parameters", "gradients of 0 where there are none"

    def change(self, step):
        self.change_each(lambda name, param: torch.zeros_like(param) if param.grad is None else param.grad)


class UnshownStale(Unshown):
    trial, says = "unused parameters", "the gradients of the step before where there are none"

    def change(self, step):
        self.change_each(lambda name, param: self.before[name] if param.grad is None else param.grad)


class UnshownLate(Unshown):
    says = "the gradients of the step before"

    def change(self, step):
        if step.number:
            self.change_each(lambda name, param: self.late[name])
        self.late = {name: self.reduced(name, step) for name in self.named()}


class UnshownEmptied(Unshown):
    trial, says = "save and load", "an empty state"

    def change(self, step):
        if step.reloads:
            self.optimizer.state.clear()


@pytest.mark.parametrize("kind", Unshown.__subclasses__(), ids=lambda kind: kind.__name__)
def test_where_gradients_cannot_be_seen_the_values_say_which_they_were(kind):
    case = case_of(getattr(kind, "trial", "plain"))
    of_ranks = []
    for rank in range(2):
        loop = loop_of(case, kind)
        loop.rank = rank
        of_ranks.append(loop.play()[0].traces[rank])
    where, hints = departure_of(case, [Part(of_ranks)])
    assert where.phase == "step"
    assert hints == (f"the values are those of the plain optimizer with {kind.says}",)


# ---------------------------------------------------------------------------------------------- the trials


def test_any_two_things_meet_in_one_trial():
    names = {trial.name for trial in make_trials() if not trial.needs}
    steps = together(names, Shape(), 1.0, own=False).steps
    lasting = {
        "accumulation": lambda s: s.micro > 1,
        "clipping": lambda s: s.max_norm,
        "scheduler": lambda s: s.factor,
    }
    for one in lasting.values():
        assert any(one(step) for step in steps)
        assert not all(one(step) for step in steps)
        for other in lasting.values():
            assert any(one(step) and other(step) for step in steps)
    for event in ("adds", "freezes", "unused", "unused_on_first", "nan", "raises", "reloads"):
        assert sum(bool(getattr(step, event)) for step in steps) >= 1
    load = next(step.number for step in steps if step.reloads)
    assert any(step.adds for step in steps[:load])
    assert [step.freezes for step in steps[:load] if step.freezes is not None] == [True]
    left_out = together(names - {"accumulation", "save and load"}, Shape(), 1.0, own=False).steps
    assert not any(step.micro > 1 or step.reloads for step in left_out)


@pytest.mark.parametrize(("ranks", "other"), [((2, 3), 3), ((4,), 2), ((2,), 4), ((3,), 2), ((1,), 2)])
def test_another_world_size_is_an_even_one_if_the_first_is(ranks, other):
    assert _Doctor(case_of("plain"), make, ranks).other(ranks[0]) == other


# -------------------------------------------------------------------------------------------- the report


def report_with(departures=(), raised=(), not_tried=()):
    tried = (*((one.trial, one.ranks) for one in (*departures, *raised)), ("clipping", 2))
    return Report("mine", (2,), tried, tuple(departures), tuple(raised), tuple(not_tried), {"seed": 0})


@functools.cache
def departed():
    class Local(PlainLoop):
        def reduced(self, name, step):
            return self.local[0][0][name]

    case = case_of("plain")
    where, hints = departure_of(case, loop_of(case, Local).play())
    return Departure("plain", 2, where.step, where.phase, where.places, hints)


def test_a_report_says_where_and_shows_the_numbers():
    report = report_with([departed()], not_tried=[NotTried("buffers", "left out", (2,))])
    text = str(report)
    assert not report.healthy
    assert "plain: departs in step 0, in backward, on ranks 0, 1 of 2" in text
    assert "gradient of first.weight, all 60 elements" in text
    assert "and rounding explains" in text
    assert "and 9 more" in text
    assert "the gradient of rank 0 alone" in text
    assert "weights on each rank: rank 0: 1, rank 1: 0" in text
    assert "right would be: rank 0: 0.5, rank 1: 0.5" in text
    assert "equal to the plain loop: clipping" in text
    assert "buffers: left out" in text
    with pytest.raises(AssertionError, match="the gradient of rank 0 alone"):
        report.check()


def test_departures_at_one_place_are_shown_once():
    found = departed()
    others = [replace(found, trial="scheduler"), replace(found, trial="scheduler", ranks=3)]
    text = str(report_with([found, *others, replace(found, trial="clipping", phase="clip")]))
    assert text.count("the gradient of rank 0 alone") == 2
    assert "also departs there, in trials (on ranks): scheduler (2, 3)" in text


def test_json_has_what_the_text_has():
    found = departed()
    found = replace(found, places=(replace(found.places[0], allowed=float("inf")), *found.places[1:]))
    read = json.loads(report_with([found]).to_json())
    assert read["healthy"] is False
    (read_back,) = read["departures"]
    assert read_back["places"][0]["parameter"] == "first.weight"
    assert read_back["places"][0]["allowed"] is None
    assert read_back["hints"] == list(found.hints)


RAISED = Raised("scheduler", 2, 1, "KeyError: 'lr'", "rank 1 raised KeyError\n\x1b[31mtraceback")


def test_markdown_has_a_table_of_the_trials_and_the_departures_in_full():
    text = report_with([departed()], [RAISED], [NotTried("buffers", "left out", (2,))]).to_markdown()
    assert text.startswith("## mine: departs from the plain loop\n")
    assert "| plain | 2 | departs in step 0, in backward, on ranks 0, 1 of 2 |" in text
    assert "| clipping | 2 | equal to the plain loop |" in text
    assert "| buffers | 2 | not tried: left out |" in text
    assert "```text\nplain: departs in step 0" in text


def test_junit_has_a_case_for_each_trial():
    suite = ElementTree.fromstring(
        report_with([departed()], [RAISED], [NotTried("buffers", "left out", (2,))]).to_junit()
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
    report = report_with(raised=[RAISED])
    assert str(report).startswith("mine on 2 ranks: raises or hangs")


def test_a_strict_check_fails_for_what_the_program_refuses_and_not_for_what_was_left_out():
    report_with(not_tried=[NotTried("buffers", "left out", (2,))]).check(strict=True)
    refused = report_with(not_tried=[NotTried("buffers", "it has no wrapper", (2, 3), refused=True)])
    refused.check()
    with pytest.raises(AssertionError, match="refused buffers, and the check is strict"):
        refused.check(strict=True)


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


REFUSING = """
def raises():
    raise ValueError(
        "only float32",
    )

def asserts():
    # A traceback names the line of the condition. (Pytest rewrites the asserts of its own files.)
    assert (
        len({"float32", "bfloat16"}) == 1
    ), "one dtype"

def fails():
    [1, 2] @ [3]
"""


@pytest.mark.parametrize(("function", "deliberate"), [("raises", True), ("asserts", True), ("fails", False)])
def test_a_refusal_is_told_from_an_operation_that_failed(function, deliberate, tmp_path):
    (tmp_path / "program.py").write_text(REFUSING, encoding="utf-8")
    program = runpy.run_path(str(tmp_path / "program.py"))
    with pytest.raises((ValueError, TypeError, AssertionError)) as caught:
        program[function]()
    assert is_deliberate(caught.value) is deliberate


# ---------------------------------------------------------------------------------------- the command


def test_the_help_names_every_trial(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    named = re.search(r"Trials: ([^.]*)\.", " ".join(capsys.readouterr().out.split()))
    assert named[1].split(", ") == list(doctor.TRIALS)


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
        (["mine.py:sharded"], "give --reference NAME or --from-plain CLASS"),
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


def test_a_file_finds_the_module_beside_it_and_reads_no_arguments_of_the_doctor(tmp_path, monkeypatch):
    (tmp_path / "beside_it.py").write_text("LR = 0.5\n")
    lines = ["import argparse", "from beside_it import LR", "argparse.ArgumentParser().parse_args()",
             "def sharded(model): return LR, argparse.ArgumentParser().parse_args()"]  # fmt: skip
    (tmp_path / "mine.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["zero-ref", "doctor", "--reference", "plain"])
    assert InFile(str(tmp_path / "mine.py"), "sharded")(None)[0] == 0.5
    assert sys.argv[1:] == ["doctor", "--reference", "plain"]


def test_of_a_hang_the_rank_that_did_not_come_is_told_and_not_the_one_that_waited():
    waited = RankError("rank 0 raised", 0, "RuntimeError: Timed out waiting 800ms for recv",
                       {1: "was still running, and was stopped, at mine.py, line 7, in step"})  # fmt: skip
    rank, summary, text = told(waited)
    assert rank == 1
    assert summary == "it hangs at mine.py, line 7, in step, and rank 0 waited for it"
    assert text.startswith("rank 1: it hangs")
    assert told(RankError("rank 0 raised", 0, "KeyError: 1", waited.others))[0] == 0
