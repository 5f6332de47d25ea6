"""The doctor on real ranks: silent on programs that are right, and right about planted mistakes."""

import re
import shlex
import warnings
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from library import planted
from library.running_page import BOOK, blocks
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import ZeroRedundancyOptimizer, cli, doctor

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
    assert not report.not_tried
    assert set(report.tried) == {(name, ranks) for name in doctor.TRIALS for ranks in (2, 3)}


# ------------------------------------------------------------------------------------ planted mistakes

QUICK = {"Summed", "LocalNorm", "BroadcastLost"}


def found_by(kind, **settings):
    trials = getattr(kind, "trials", ("plain",))
    report = examined(kind, only=trials, **settings)
    assert not report.raised, str(report)
    assert report.departures, str(report)
    for departure in report.departures:
        assert any(kind.says in cause for cause in departure.causes), str(report)


@pytest.mark.parametrize(
    "kind", [k for k in planted.PLANTED if k.__name__ in QUICK], ids=lambda k: k.__name__
)
def test_a_planted_mistake_is_named(kind):
    found_by(kind, ranks=(2,))


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "ranks"), list(zip(planted.PLANTED, cycle((3, 4, 2)))))
def test_every_planted_mistake_is_named_on_some_number_of_ranks(kind, ranks):
    found_by(kind, ranks=(ranks,), seed=7)


def test_gradients_that_nobody_averages_are_found_although_owners_send_their_values():
    report = examined(around_ddp, ranks=(3,), only=["plain"])
    (departure,) = report.departures
    assert (departure.step, departure.phase) == (0, "backward")
    assert departure.causes == ("gradients are not reduced: a rank steps with those of its own data alone",)


def around_ddp(model):
    return ZeroRedundancyOptimizer(model.parameters(), ADAMW, **planted.OPTIONS), model


def test_options_that_are_not_those_of_the_plain_loop_are_named():
    plain = {"lr": 0.001, "weight_decay": planted.OPTIONS["weight_decay"]}
    report = examined(even, ranks=(2,), only=["plain"], options=plain)
    assert report.departures[0].causes == (
        f"the program's optimizer has lr={planted.OPTIONS['lr']:g}, and the plain loop's has lr=0.001",
    )


def test_buffers_that_are_not_sent_are_found():
    report = examined(planted.ddp_buffers_apart, ranks=(2,), only=["plain", "buffers"])
    assert len(report.departures) == 1, str(report)
    (departure,) = report.departures
    assert (departure.trial, departure.phase, departure.rank) == ("buffers", "forward", 1)
    assert departure.causes == ("buffers are not synchronised: each rank's forward uses its own",)


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


def test_where_a_rank_hangs_is_told():
    report = examined(Hangs, ranks=(2,), only=["clipping"])
    (raised,) = report.raised
    assert raised.trial == "clipping"
    assert re.search(r"in clip:?\s+dist\.barrier\(\)", raised.text)


# --------------------------------------------------------------------------------------- the command

PAGE = BOOK / "doctor.md"
NUMBER = r"\d\.?\d*(?:e\+\d+)?"


def test_the_command_says_of_the_pages_programs_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(blocks("python", PAGE)[0])
    words = ["--ranks", "2", "--only", "plain", "--junit", "doctor.xml"]
    by_reference, by_class = [shlex.split(one)[1:] for one in blocks("bash", PAGE)[0].splitlines()[1:]]
    for right in (by_reference, by_class):
        assert cli.main([*right, *words]) == 0
        assert "train.py:sharded on 2 ranks: healthy" in capsys.readouterr().out

    command, said = blocks("text", PAGE)[0].split("\n", 1)
    assert cli.main([*shlex.split(command)[2:], "--junit", "doctor.xml"]) == 1
    found, _, left_out = capsys.readouterr().out.partition("\nnot tried:")
    assert left_out.strip().endswith("buffers: left out")
    assert re.sub(NUMBER, "#", found).split() == re.sub(NUMBER, "#", said).split()
    # Another processor may round a value otherwise, and then the rounding that is explained is another too.
    assert numbers(found)[:-1] == pytest.approx(numbers(said)[:-1], rel=1e-5)
    assert 'failures="1"' in (tmp_path / "doctor.xml").read_text()


def numbers(report):
    """Return the numbers of a report with one departure; the last one is explained by rounding."""
    return [float(one) for one in re.findall(NUMBER, report)]
