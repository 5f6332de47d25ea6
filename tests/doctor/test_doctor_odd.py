"""The doctor and programs that are unlike others: what they return, how they refuse, and where they hang."""

import pytest
import torch
import torch.distributed as dist
from library import planted
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import doctor

pytestmark = pytest.mark.ranks
ADAMW = torch.optim.AdamW


def examined(factory, only, from_plain=ADAMW, options=planted.OPTIONS, **settings):
    return doctor.diagnose(
        factory, from_plain=from_plain, options=options, only=only, **{"ranks": (2,)} | settings
    )


def reasons(report):
    return {one.trial: one.reason for one in report.not_tried if one.reason != "left out"}


# -------------------------------------------------------------------------------------- right programs


def ddp_last(model):
    ddp = DDP(model)
    return model, planted.adamw(ddp), ddp


class ByHand:
    """An optimizer with `step` and `zero_grad` and nothing else."""

    def __init__(self, model):
        self.optimizer = planted.adamw(model)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


class ConsolidatesLikeOSS(ADAMW):
    def consolidate_state_dict(self, recipient_rank=0):
        pass


def like_oss(model):
    return ConsolidatesLikeOSS(model.parameters(), **planted.OPTIONS)


@pytest.mark.parametrize(
    ("factory", "only"),
    [
        (ddp_last, ["plain"]),
        (ByHand, ["plain", "zero_grad"]),
        (like_oss, ["plain", "another world size"]),
    ],
    ids=["ddp_last", "by_hand", "like_oss"],
)
def test_it_is_healthy(factory, only):
    report = examined(factory, only)
    assert report.healthy, str(report)
    assert ("plain", 2) in report.tried
    assert reasons(report) == (
        {"zero_grad": "ByHand.zero_grad takes no set_to_none"} if factory is ByHand else {}
    )


def twice(model):
    return DDP(model), planted.adamw(model), model


def test_of_two_modules_the_first_is_the_model():
    (raised,) = examined(twice, ["plain"]).raised
    assert "return an optimizer, (optimizer, wrapper) or a doctor.Program" in raised.text


class OneFlatShard(doctor.Program):
    """ZeRO stage 1 on one flat buffer: each rank's optimizer has its own part as its only parameter."""

    def __init__(self, model):
        self.params = list(model.parameters())
        self.size = -(-sum(param.numel() for param in self.params) // dist.get_world_size())
        self.shard = nn.Parameter(self.mine([param.detach() for param in self.params]))
        super().__init__(ADAMW([self.shard], **planted.OPTIONS), model, averaged_by="doctor")

    def mine(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        padded = nn.functional.pad(flat, (0, self.size * dist.get_world_size() - len(flat)))
        return padded.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self):
        self.shard.grad = self.mine([param.grad for param in self.params])
        self.shard.copy_(self.mine(self.params))
        self.optimizer.step()
        flat = torch.empty(self.size * dist.get_world_size())
        dist.all_gather_into_tensor(flat, self.shard.detach())
        nn.utils.vector_to_parameters(flat[: sum(param.numel() for param in self.params)], self.params)


def test_a_ranks_own_part_of_the_state_is_not_loaded_as_if_it_were_whole():
    report = examined(OneFlatShard, ["plain", "another world size"])
    assert report.healthy, str(report)
    assert reasons(report)["another world size"].startswith("AdamW.state_dict() lacks the state of some")


class SignsWithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad.sign(), alpha=0.05)


def signs(model):
    return SignsWithoutRate(model.parameters())


def test_a_scheduler_needs_a_learning_rate():
    report = examined(signs, ["plain", "scheduler"], SignsWithoutRate, None)
    assert report.healthy, str(report)
    assert reasons(report) == {"scheduler": "SignsWithoutRate has a group without a learning rate"}


def test_an_optimizer_whose_step_needs_a_closure_is_refused():
    with pytest.raises(ValueError, match=r"LBFGS\.step needs a closure"):
        examined(planted.plain_ddp, ["plain"], torch.optim.LBFGS, None)


# -------------------------------------------------------------------------------------- wrong programs


class Momentum(torch.optim.Optimizer):
    """Its state of a parameter is a tensor, and no dict."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param] = param.grad + 0.9 * self.state.get(param, 0.0)
                    param.sub_(self.state[param], alpha=group["lr"])

    def clip_grad_norm_(self, max_norm):
        pass


class HalfGradients(doctor.Program):
    """It shows a part of each gradient."""

    def gradients(self):
        return {
            name: grad if grad is None else grad.flatten()[: -(-grad.numel() // 2)]
            for name, grad in super().gradients().items()
        }


def unclipped_halves(model):
    ddp = DDP(model)
    return HalfGradients(Momentum(ddp.parameters(), lr=0.05), model, ddp)


def test_a_departure_is_found_whatever_state_and_gradients_look_like():
    (departure,) = examined(unclipped_halves, ["clipping"], Momentum, {"lr": 0.05}).departures
    assert (departure.trial, departure.step) == ("clipping", 0)


class ForgetsTheLast(ADAMW):
    def state_dict(self):
        whole = super().state_dict()
        group = whole["param_groups"][0] | {"params": whole["param_groups"][0]["params"][:-1]}
        return {"state": {at: whole["state"][at] for at in group["params"]}, "param_groups": [group]}


def forgets_the_last(model):
    return ForgetsTheLast(model.parameters(), **planted.OPTIONS)


def test_an_error_of_torchs_own_optimizer_is_no_refusal_of_the_program():
    (raised,) = examined(forgets_the_last, ["save and load"]).raised
    assert "loaded state dict contains a parameter group" in raised.summary


class NotImplementedOnOne(planted.Hooked):
    def step(self):
        if dist.get_rank() == 1:
            raise NotImplementedError("sparse")
        super().step()


class NotImplementedForClipping(planted.Hooked):
    def clip(self, max_norm):
        raise NotImplementedError("no norm")


def test_what_is_not_implemented_is_a_refusal_only_on_all_ranks_and_not_in_the_plain_trial():
    (raised,) = examined(NotImplementedOnOne, ["plain"]).raised
    assert (raised.rank, raised.summary) == (1, "NotImplementedError: sparse")
    report = examined(NotImplementedForClipping, ["plain", "clipping"])
    assert report.healthy, str(report)
    assert reasons(report) == {"clipping": "all ranks refuse it: NotImplementedError: no norm"}


class OneRankCannot(planted.Hooked):
    def values(self):
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked == 6 and dist.get_rank() == 1:  # after the last step
            raise doctor.NotSupportedError("it has no values")
        return super().values()


def test_a_trial_that_one_rank_alone_cannot_do_is_a_finding():
    (raised,) = examined(OneRankCannot, ["plain"]).raised
    assert (raised.rank, raised.summary) == (
        1,
        "it refuses the trial, and other ranks do not: it has no values",
    )


class OneRankCannotClip(planted.Hooked):
    def clip(self, max_norm):
        planted.give_up_soon()
        if dist.get_rank() == 2:
            raise doctor.NotSupportedError("it has no norm")
        super().clip(max_norm)


def test_one_rank_that_stops_alone_is_named_and_not_those_that_wait_for_it():
    (raised,) = examined(OneRankCannotClip, ["clipping"], ranks=(3,)).raised
    assert (raised.trial, raised.rank) == ("clipping", 2)
    assert raised.summary == "it refuses the trial, and other ranks do not: it has no norm"
    assert "rank 0" in raised.text, "what the others met is told too"


class WaitsForNobody(planted.Hooked):
    def set_lr_factor(self, factor):
        self.waits()

    def add_group(self, layer, **options):
        self.waits()

    def clip(self, max_norm):
        self.waits()

    def waits(self):
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)


@pytest.mark.thorough
def test_after_two_trials_that_hang_in_a_collective_the_rest_is_not_tried(impatient):
    report = examined(WaitsForNobody, ["clipping", "scheduler", "group added"], timeout=5)
    assert [one.trial for one in report.raised] == ["clipping", "scheduler"]
    assert reasons(report) == {"group added": "2 trials hung before it"}
