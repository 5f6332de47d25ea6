"""The doctor and programs with a model of their own, whose sums round and whose forward may be random."""

import pytest
import torch
import torch.distributed as dist
from library import planted
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import ZeroRedundancyOptimizer, doctor

pytestmark = pytest.mark.ranks
ADAMW = torch.optim.AdamW


def examined(factory, only, batch, loss, ranks=(2,)):
    return doctor.diagnose(
        factory, from_plain=ADAMW, options=planted.OPTIONS, ranks=ranks, only=only, batch=batch, loss=loss
    )


def own_model():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    ddp = DDP(model)
    return model, ZeroRedundancyOptimizer(ddp.parameters(), ADAMW, **planted.OPTIONS), ddp


def batch(rank, number):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def loss(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def own_model_unaveraged():
    model, optimizer, _ = own_model()
    return model, optimizer, model


OWN = {"batch": batch, "loss": loss}


def healthy(factory, only, **settings):
    report = examined(factory, only, **OWN | settings)
    assert report.healthy, str(report)
    assert set(report.tried) == {(name, 2) for name in only}


def departing(factory, only, **settings):
    (departure,) = examined(factory, only, **OWN | settings).departures
    return departure


def test_a_program_with_a_model_of_its_own_is_held_against_its_plain_loop():
    only = ["plain", "accumulation", "clipping", "buffers", "accumulation and clipping"]
    report = examined(own_model, only, **OWN)
    assert report.healthy, str(report)
    assert "buffers" in {one.trial for one in report.not_tried}
    wrong = examined(own_model_unaveraged, only, **OWN)
    assert [one.trial for one in wrong.departures] == ["plain", "accumulation", "clipping"]
    left = {one.trial: one.reason for one in wrong.not_tried}
    assert left["accumulation and clipping"] == "the trial 'accumulation' was not played, or departs"


class LooksAtTheLoss(doctor.Program):
    """It finds by itself on all ranks that one rank's loss is no number, and its data are whole numbers."""

    def backward(self, loss):
        super().backward(loss)
        self.lost = loss.detach().clone()

    def skips(self, is_nan):
        dist.all_reduce(self.lost)
        return bool(self.lost.isnan())


def own_tokens():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    ddp = DDP(model)
    return LooksAtTheLoss(ZeroRedundancyOptimizer(ddp.parameters(), ADAMW, **planted.OPTIONS), model, ddp)


def tokens(rank, number):
    return torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(1000 * rank + number))


def next_token(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def test_a_loss_is_nan_also_where_data_are_whole_numbers():
    healthy(own_tokens, ["plain", "NaN step"], batch=tokens, loss=next_token)


class ClipsNothing(ADAMW):
    def clip_grad_norm_(self, max_norm):
        pass


def under_ddp(model, optimizer=ADAMW):
    ddp = DDP(model, find_unused_parameters=True)
    return model, optimizer(ddp.parameters(), **planted.OPTIONS), ddp


def unclipped():
    torch.manual_seed(3)
    return under_ddp(nn.Linear(6, 2), ClipsNothing)


def test_gradients_of_a_model_of_its_own_are_long_enough_to_be_clipped():
    assert departing(unclipped, ["clipping"]).hints[0].startswith("gradients are not scaled")


def tiny_loss(model, batch):
    return loss(model, batch) * 2.0**-20


def test_where_nothing_would_be_clipped_clipping_is_not_tried():
    report = examined(unclipped, ["plain", "clipping"], batch=batch, loss=tiny_loss)
    reasons = {one.trial: one.reason for one in report.not_tried}
    assert reasons["clipping"] == "the gradients are shorter than the limit, so nothing would be clipped"


def with_dropout(wrapped=True):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 2))
    model, optimizer, ddp = under_ddp(model)
    return model, optimizer, ddp if wrapped else model


def with_dropout_unaveraged():
    return with_dropout(wrapped=False)


def test_dropout_is_that_of_the_plain_loop_and_hides_nothing():
    state = torch.get_rng_state()
    healthy(with_dropout, ["plain"])
    departure = departing(with_dropout_unaveraged, ["plain"])
    assert "each rank has the gradient of its own data alone: it is not reduced" in departure.hints[0]
    assert torch.equal(torch.get_rng_state(), state)


DRAWS = torch.Generator()


def noisy_loss(model, batch):
    return loss(model, batch) * (1 + torch.rand((), generator=DRAWS))


def test_a_plain_loop_that_is_never_twice_the_same_is_not_compared_with():
    report = examined(unclipped, ["plain"], batch=batch, loss=noisy_loss)
    assert [one.reason for one in report.not_tried if one.trial == "plain"] == [
        "the plain loop gives other values each time it is played"
    ]
    assert not report.healthy


class Odd(nn.Module):
    """A layer that is not used, an integer parameter, a complex one, and a buffer that its forward reads."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(4, 4)
        self.places = nn.Parameter(torch.arange(3), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs):
        outputs = self.used(inputs - self.mean) + (self.phase * (1 + 2j)).real ** 2
        with torch.no_grad():
            self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        return outputs


def odd(optimizer=ADAMW):
    torch.manual_seed(3)
    return under_ddp(Odd(), optimizer)


def test_a_model_may_have_parameters_that_are_unused_integer_or_complex_and_buffers_that_it_reads():
    healthy(odd, ["plain", "accumulation", "zero_grad", "save and load"])


class RealOnly(ADAMW):
    @torch.no_grad()
    def step(self):
        params = [param for param in self.param_groups[0]["params"] if param.is_complex()]
        before = [param.imag.clone() for param in params]
        super().step()
        for param, imag in zip(params, before):
            param.imag.copy_(imag)


def odd_real_only():
    return odd(RealOnly)


def test_a_complex_parameter_departs_in_its_imaginary_part():
    departure = departing(odd_real_only, ["plain"])
    assert (departure.step, departure.parameters) == (0, ("phase",))
    assert (departure.places[0].start, departure.places[0].stop) == (1, 4)  # as real, imaginary, real, ...


class EachBackward(nn.Module):
    """It takes the batch in another order, and averages after every backward, as it has no `no_sync`."""

    def __init__(self, model):
        super().__init__()
        self.ddp = DDP(model)

    def forward(self, inputs):
        return self.ddp(inputs.flip(0)).flip(0)


def flipped():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    return model, ADAMW(model.parameters(), **planted.OPTIONS), EachBackward(model)


@pytest.mark.parametrize("trial", ["plain", "accumulation"])
def test_rounding_of_gradients_is_no_departure(trial):
    healthy(flipped, [trial])


SEEN = [[batch(rank, number) for number in range(30)] for rank in range(2)]


def counted(rank, number):
    return SEEN[rank][number]


def test_batches_are_numbered_from_0_six_for_each_step():
    healthy(own_model, ["plain", "accumulation", "exception"], batch=counted)
