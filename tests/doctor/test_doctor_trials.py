"""The doctor on real ranks: silent on programs that are right, and right about planted mistakes."""

import re
import shlex
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from library import planted, wrong_programs
from library.running_page import BOOK, blocks
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import ZeroRedundancyOptimizer, cli, doctor
from zero_ref.doctor.trials import make_trials

pytestmark = pytest.mark.ranks
ADAMW = torch.optim.AdamW
PLAIN = {"from_plain": ADAMW, "options": planted.OPTIONS}


def examined(factory, **settings):
    return doctor.diagnose(factory, **PLAIN | settings)


def even(model):
    ddp = DDP(model, find_unused_parameters=True)
    return ZeroRedundancyOptimizer(ddp.parameters(), ADAMW, partition="even", **planted.OPTIONS), ddp


# More right programs: course/test_museum_ranks.py.
def test_a_sharded_optimizer_is_healthy_in_all_trials():
    report = examined(even)
    assert report.healthy, str(report)
    pairs = {trial.name for trial in make_trials() if trial.needs}
    assert {one.trial for one in report.not_tried} == pairs
    assert {one.reason for one in report.not_tried} == {"'all together' has both, and is equal"}
    assert set(report.tried) == {(n, ranks) for n in doctor.TRIALS if n not in pairs for ranks in (2, 3, 4)}


# -------------------------------------------------------------------------------------- wrong programs

QUICK = {"BroadcastLost", "NormWithoutTail", "RateNotLoaded", "MeanOfMeans"}
WRONG = (*planted.PLANTED, *wrong_programs.KINDS, *wrong_programs.FURTHER, *wrong_programs.BY_READERS)
RUNS = [(kind, 2 + number % 3, 1 + number % 4) for number, kind in enumerate(WRONG)]
"""Each on 2, 3 or 4 ranks, by turns, with one of four seeds."""


def found_by(kind, ranks, seed=0):
    settings = {"ranks": (4,) if kind is wrong_programs.WrongOwnerInHybrid else (ranks,), "seed": seed}
    if issubclass(kind, wrong_programs.OfTokens):
        report = examined(wrong_programs.mean_of_means, only=[kind.trial], **settings, **wrong_programs.OWN)
    else:
        needs = next(trial.needs for trial in make_trials() if trial.name == kind.trial)
        # A pair is played where all things together depart, which is then tried without one of the two.
        report = examined(kind, only=[*needs, kind.trial, *(["all together"] if needs else [])], **settings)
    assert not report.raised, str(report)
    assert [(one.trial, one.phase) for one in report.departures] == [(kind.trial, kind.phase)], str(report)
    assert kind.words in str(report)


@pytest.mark.parametrize("kind", [k for k in WRONG if k.__name__ in QUICK], ids=lambda k: k.__name__)
def test_a_wrong_program_departs_in_its_trial_and_phase(kind):
    found_by(kind, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "ranks", "seed"), RUNS)
def test_every_wrong_program_departs_there_on_any_number_of_ranks(kind, ranks, seed):
    found_by(kind, ranks, seed)


# In these trials a rank stops or waits where all things are together, or the trial is none of them.
NOT_TOGETHER = {
    *("RankZeros", "DividedByUsers", "NormOfLastMicroBatch", "TailNotReduced", "LargestOfRanks"),
    *("AverageBeforeGather", "NoStartBroadcast", "MeanOfMeans", "WrongOwnerInHybrid"),
    *("ClipsAlways", "BuffersNotLoaded"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [k for k in WRONG if k.__name__ not in NOT_TOGETHER], ids=lambda k: k.__name__
)
def test_what_a_trial_shows_shows_also_where_all_things_are_together(kind):
    report = examined(kind, ranks=(2,), only=["all together"], without=["different starts"])
    assert [one.trial for one in report.departures] == ["all together"], str(report)


def with_masters(model):
    ddp = DDP(model)
    return ZeroRedundancyOptimizer(
        ddp.parameters(), ADAMW, master_dtype=torch.float32, **planted.OPTIONS
    ), ddp


def test_a_program_without_the_masters_that_it_should_have_departs():
    settings = {"masters": True, "ranks": (2,), "only": ["mixed dtypes"]}
    assert examined(with_masters, **settings).healthy
    (departure,) = examined(even, **settings).departures
    assert departure.phase == "step"
    assert {name.split(".")[0] for name in departure.parameters} <= {"third", "tiny"}


def test_options_that_are_not_those_of_the_plain_loop_are_shown():
    plain = {"lr": 0.001, "weight_decay": planted.OPTIONS["weight_decay"]}
    (departure,) = examined(even, ranks=(2,), only=["plain"], options=plain).departures
    assert "group 0 has lr=0.05 on rank 0, and 0.001 in the plain loop" in departure.hints


# ------------------------------------------------------------------------- what raises, hangs, refuses


class RaisesOnOneRank(planted.Hooked):
    def clip(self, max_norm):
        if dist.get_rank() == 1:
            raise KeyError("norm")
        super().clip(max_norm)


class RefusesToClip(planted.Hooked):
    def clip(self, max_norm):
        raise ValueError("this optimizer does not clip")


class CannotClip(planted.Hooked):
    def clip(self, max_norm):
        raise doctor.NotSupportedError("it has no norm")


class Hangs(planted.Hooked):
    def clip(self, max_norm):
        planted.give_up_soon()
        if dist.get_rank() == 1:
            dist.barrier()


def test_an_exception_on_one_rank_is_a_finding_with_its_place():
    report = examined(RaisesOnOneRank, ranks=(2,), only=["clipping", "scheduler"])
    (raised,) = report.raised
    assert (raised.trial, raised.rank, raised.summary) == ("clipping", 1, "KeyError: 'norm'")
    assert "in clip, step 0 of the trial 'clipping'" in raised.text
    assert ("scheduler", 2) in report.tried
    assert not report.healthy


def test_a_refusal_of_all_ranks_is_not_tried():
    report = examined(RefusesToClip, ranks=(2,), only=["clipping", "scheduler"])
    assert report.healthy
    assert [one.trial for one in report.refused] == ["clipping"]
    reasons = {one.trial: one.reason for one in report.not_tried}
    assert reasons["clipping"] == "all ranks refuse it: ValueError: this optimizer does not clip"


class Warns(planted.Hooked):
    def clip(self, max_norm):
        warnings.warn("clipping is old", stacklevel=1)
        super().clip(max_norm)


class OnlyFloat32(torch.optim.AdamW):
    def step(self, closure=None):
        if any(param.dtype != torch.float32 for group in self.param_groups for param in group["params"]):
            raise ValueError("only float32")
        return super().step(closure)


def test_a_warning_is_no_finding():
    assert examined(Warns, ranks=(2,), only=["clipping"]).tried == (("clipping", 2),)


def test_a_trial_that_the_plain_loop_cannot_play_is_not_tried():
    report = examined(planted.Hooked, from_plain=OnlyFloat32, ranks=(2,), only=["plain", "mixed dtypes"])
    assert report.tried == (("plain", 2),)
    reasons = {one.trial: one.reason for one in report.not_tried}
    assert reasons["mixed dtypes"] == "the plain loop itself raises ValueError: only float32"


def test_what_a_program_cannot_do_is_not_tried():
    report = examined(CannotClip, ranks=(2,), only=["clipping"])
    assert [(one.trial, one.reason) for one in report.refused] == [("clipping", "it has no norm")]
    assert not report.healthy  # nothing was tried


class NeverEnds(planted.Hooked):
    def clip(self, max_norm):
        planted.give_up_soon()
        if dist.get_rank() == 1:
            time.sleep(600)
        super().clip(max_norm)
        dist.barrier()


def test_a_rank_that_hangs_alone_leads_and_not_the_one_whose_collective_gave_up():
    (raised,) = examined(NeverEnds, ranks=(2,), only=["clipping"]).raised
    assert raised.rank == 1
    assert re.search(r"it hangs at .*, in clip: time\.sleep\(600\), and rank 0 waited for it", raised.summary)


def test_where_a_rank_hangs_is_told():
    report = examined(Hangs, ranks=(2,), only=["clipping"])
    (raised,) = report.raised
    assert raised.trial == "clipping"
    assert re.search(r"in clip:?\s+dist\.barrier\(\)", raised.text)


# --------------------------------------------------------------------------------------- the command

PAGE = BOOK / "doctor.md"
NUMBER = r"-?\d\.?\d*(?:e[+-]\d+)?"


def test_the_command_says_of_the_pages_programs_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(blocks("python", PAGE)[0])
    words = ["--ranks", "2", "--only", "plain", "--junit", "doctor.xml", "--markdown", "doctor.md"]
    by_reference, by_class = [shlex.split(one)[1:] for one in blocks("bash", PAGE)[0].splitlines()[1:]]
    for right in (by_reference, by_class):
        assert cli.main([*right, *words]) == 0
        assert "train.py:sharded on 2 ranks: healthy" in capsys.readouterr().out

    command, said = blocks("text", PAGE)[0].split("\n", 1)
    assert cli.main([*shlex.split(command)[2:], *words[-4:]]) == 1
    found, _, left_out = capsys.readouterr().out.partition("\nnot tried:")
    assert left_out.strip().endswith("all together: left out")
    # What rounding explains is the largest of random numbers.
    found, said = (re.sub(r"rounding explains \S+", "", one) for one in (found, said))
    assert re.sub(NUMBER, "#", found).split() == re.sub(NUMBER, "#", said).split()
    numbers = [[float(one) for one in re.findall(NUMBER, text)] for text in (found, said)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert 'failures="1"' in (tmp_path / "doctor.xml").read_text()
    assert "| plain | 2 | departs in step 0" in (tmp_path / "doctor.md").read_text()
