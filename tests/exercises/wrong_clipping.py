"""Chapter 9: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

# --------------------------------------------------------------------------------------------- global_norm


def _of_all(number: float, comm: Any) -> float:
    total = torch.tensor([number])
    comm.all_reduce(total).wait()
    return total.item()


def _own(gradients: list[torch.Tensor], p: float) -> float:
    return torch.linalg.vector_norm(torch.cat([*gradients, torch.zeros(1)]), p).item()


def of_this_rank_alone(gradients: Any, norm_type: float, comm: Any) -> float:
    return _own(gradients, norm_type)


def adds_norms(gradients: Any, norm_type: float, comm: Any) -> float:
    return _of_all(_own(gradients, norm_type), comm)


def adds_norms_of_slices(gradients: Any, norm_type: float, comm: Any) -> float:
    return _of_all(sum(_own([gradient], norm_type) for gradient in gradients), comm)


def takes_no_root(gradients: Any, norm_type: float, comm: Any) -> float:
    return _of_all(_own(gradients, norm_type) ** norm_type, comm)


def averages_the_norms(gradients: Any, norm_type: float, comm: Any) -> float:
    powers = _of_all(_own(gradients, norm_type) ** norm_type, comm)
    return float((powers / comm.world_size) ** (1 / norm_type))


def forgets_infinity(gradients: Any, norm_type: float, comm: Any) -> float:
    if norm_type == math.inf:
        return _of_all(_own(gradients, norm_type), comm)
    return float(_of_all(_own(gradients, norm_type) ** norm_type, comm) ** (1 / norm_type))


def powers_of_infinity(gradients: Any, norm_type: float, comm: Any) -> float:
    powers = sum((gradient.abs() ** norm_type).sum().item() for gradient in gradients)
    total = _of_all(powers, comm)
    return math.nan if norm_type == math.inf else float(total ** (1 / norm_type))


def powers_and_a_root_at_infinity(gradients: Any, norm_type: float, comm: Any) -> float:
    powers = sum((gradient.abs() ** norm_type).sum().item() for gradient in gradients)
    return float(_of_all(powers, comm) ** (1 / norm_type))


def always_the_2_norm(gradients: Any, norm_type: float, comm: Any) -> float:
    return math.sqrt(_of_all(_own(gradients, 2.0) ** 2, comm))


def always_the_square_root(gradients: Any, norm_type: float, comm: Any) -> float:
    if norm_type == math.inf:
        norm_type = 2.0
    return math.sqrt(_of_all(_own(gradients, norm_type) ** norm_type, comm))


def ranks_with_nothing_return(gradients: Any, norm_type: float, comm: Any) -> float:
    if not gradients:
        return 0.0
    places = torch.zeros(comm.world_size)
    places[comm.rank] = _own(gradients, norm_type)
    comm.all_reduce(places).wait()
    return torch.linalg.vector_norm(places, norm_type).item()


def one_call_for_each_slice(gradients: Any, norm_type: float, comm: Any) -> float:
    if norm_type == math.inf:
        return 0.0
    total = sum(_of_all(_own([gradient], norm_type) ** norm_type, comm) for gradient in gradients)
    return float(total ** (1 / norm_type))


def stacks_nothing(gradients: Any, norm_type: float, comm: Any) -> float:
    places = torch.zeros(comm.world_size)
    norms = torch.stack([torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients])
    places[comm.rank] = torch.linalg.vector_norm(norms, norm_type)
    comm.all_reduce(places).wait()
    return torch.linalg.vector_norm(places, norm_type).item()


def gathers_the_gradients(gradients: Any, norm_type: float, comm: Any) -> float:
    mine = torch.zeros(1000)
    own = torch.cat([*gradients, torch.zeros(1)])
    mine[: len(own)] = own
    return _own(comm.all_gather(mine), norm_type)


def a_norm_for_each_rank(gradients: Any, norm_type: float, comm: Any) -> Any:
    places = torch.zeros(comm.world_size + 1)
    places[comm.rank] = _own(gradients, norm_type)
    comm.all_reduce(places).wait()
    return places


def clips_on_the_way(gradients: Any, norm_type: float, comm: Any) -> float:
    for gradient in gradients:
        gradient.mul_(0.5)
    return adds_norms(gradients, norm_type, comm)


# ------------------------------------------------------------------------------------------------ may_step


def _finite(gradients: Any) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def looks_at_its_own(gradients: Any, comm: Any) -> bool:
    return _finite(gradients)


def returns_as_soon_as_it_knows(gradients: Any, comm: Any) -> bool:
    return _finite(gradients) and _of_all(0.0, comm) == 0


def misses_nan(gradients: Any, comm: Any) -> bool:
    return _of_all(float(any(bool(g.isinf().any()) for g in gradients)), comm) == 0


def steps_unless_all_are_spoiled(gradients: Any, comm: Any) -> bool:
    return _of_all(float(not _finite(gradients)), comm) < comm.world_size


def adds_the_elements(gradients: Any, comm: Any) -> bool:
    return math.isfinite(_of_all(sum((gradient.sum().item() for gradient in gradients), 0.0), comm))


def rank_0_decides(gradients: Any, comm: Any) -> bool:
    return _of_all(float(not _finite(gradients) and comm.rank == 0), comm) == 0


def counts(gradients: Any, comm: Any) -> int:
    return int(_of_all(float(not _finite(gradients)), comm))


# ------------------------------------------------------------------------------------------- trust_ratios


def _squares(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> torch.Tensor:
    squares = torch.zeros(2, count)
    for weight, gradient, param in zip(weights, gradients, params):
        squares[0, param] += weight.square().sum()
        squares[1, param] += gradient.square().sum()
    comm.all_reduce(squares).wait()
    return squares


def _of_slices(ratios: torch.Tensor, squares: torch.Tensor, params: Any) -> list[float]:
    return [ratios[param].item() if squares[:, param].all() else 1.0 for param in params]


def ratio_of_the_slice(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    return [(weight.norm() / gradient.norm()).item() for weight, gradient in zip(weights, gradients)]


def ratio_of_this_rank(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    squares = torch.zeros(2, count)
    for weight, gradient, param in zip(weights, gradients, params):
        squares[0, param] += weight.square().sum()
        squares[1, param] += gradient.square().sum()
    return _of_slices((squares[0] / squares[1]).sqrt(), squares, params)


def forgets_the_roots(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    squares = _squares(weights, gradients, params, count, comm)
    return _of_slices(squares[0] / squares[1], squares, params)


def gradients_by_weights(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    squares = _squares(weights, gradients, params, count, comm)
    return _of_slices((squares[1] / squares[0]).sqrt(), squares, params)


def one_for_the_model(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    squares = _squares(weights, gradients, params, count, comm).sum(dim=1)
    return [(squares[0] / squares[1]).sqrt().item() for _ in params]


def divides_by_zero(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    squares = _squares(weights, gradients, params, count, comm)
    return [(squares[0, param] / squares[1, param]).sqrt().item() for param in params]


def keeps_the_last_slice(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    squares = torch.zeros(2, count)
    for weight, gradient, param in zip(weights, gradients, params):
        squares[0, param], squares[1, param] = weight.square().sum(), gradient.square().sum()
    comm.all_reduce(squares).wait()
    return _of_slices((squares[0] / squares[1]).sqrt(), squares, params)


def adds_norms_of_ranks(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    norms = torch.zeros(2, count)
    for weight, gradient, param in zip(weights, gradients, params):
        norms[0, param] += weight.norm()
        norms[1, param] += gradient.norm()
    comm.all_reduce(norms).wait()
    return _of_slices(norms[0] / norms[1], norms, params)


def a_call_for_each_parameter(
    weights: Any, gradients: Any, params: Any, count: int, comm: Any
) -> list[float]:
    squares = torch.zeros(2, count)
    for weight, gradient, param in zip(weights, gradients, params):
        squares[0, param] += weight.square().sum()
        squares[1, param] += gradient.square().sum()
    for of_param in range(count):
        for which in (0, 1):
            comm.all_reduce(squares[which, of_param]).wait()
    return _of_slices((squares[0] / squares[1]).sqrt(), squares, params)


def only_owners_of_it_call(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    return (
        ratio_of_this_rank(weights, gradients, params, count, comm)
        if not params
        else _of_slices(
            (squares := _squares(weights, gradients, params, count, comm))[0].sqrt() / squares[1].sqrt(),
            squares,
            params,
        )
    )


def one_for_each_parameter(weights: Any, gradients: Any, params: Any, count: int, comm: Any) -> list[float]:
    squares = _squares(weights, gradients, params, count, comm)
    return _of_slices((squares[0] / squares[1]).sqrt(), squares, range(count))


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("clipping.global_norm", of_this_rank_alone, r"What do the others own\?"),
    ("clipping.global_norm", adds_norms, r"sum of norms"),
    ("clipping.global_norm", adds_norms_of_slices, r"sum of norms"),
    ("clipping.global_norm", takes_no_root, r"p-th root"),
    ("clipping.global_norm", averages_the_norms, r"divided by the number of ranks"),
    ("clipping.global_norm", forgets_infinity, r"norm_type=inf .* sum of norms"),
    ("clipping.global_norm", powers_of_infinity, r"the largest element counts"),
    ("clipping.global_norm", powers_and_a_root_at_infinity, r"x\*\*inf is 0, 1 or infinite"),
    ("clipping.global_norm", always_the_2_norm, r"2-norm, whatever"),
    ("clipping.global_norm", always_the_square_root, r"must be the p-th one, too"),
    ("clipping.global_norm", ranks_with_nothing_return, r"same calls.*owns nothing"),
    ("clipping.global_norm", one_call_for_each_slice, r"do not make the same calls"),
    ("clipping.global_norm", stacks_nothing, r"raised RuntimeError: stack expects a non-empty"),
    ("clipping.global_norm", gathers_the_gradients, r"Gradients stay where they are"),
    ("clipping.global_norm", a_norm_for_each_rank, r"must return one number"),
    ("clipping.global_norm", clips_on_the_way, r"only to look at them"),
    ("clipping.may_step", looks_at_its_own, r"some step and some do not"),
    ("clipping.may_step", returns_as_soon_as_it_knows, r"already found what it looked for"),
    ("clipping.may_step", misses_nan, r"A NaN is not infinite"),
    ("clipping.may_step", steps_unless_all_are_spoiled, r"on any rank, is enough"),
    ("clipping.may_step", adds_the_elements, r"may overflow"),
    ("clipping.may_step", rank_0_decides, r"on any rank, is enough"),
    ("clipping.may_step", counts, r"must return True or False"),
    ("clipping.trust_ratios", ratio_of_the_slice, r"ratio of this slice alone. Parameter 1 has 2 slices"),
    ("clipping.trust_ratios", ratio_of_this_rank, r"this slice alone|what this rank owns"),
    ("clipping.trust_ratios", forgets_the_roots, r"ratio of the squares"),
    ("clipping.trust_ratios", gradients_by_weights, r"divided by that of the weights"),
    ("clipping.trust_ratios", one_for_the_model, r"one ratio for the whole model"),
    ("clipping.trust_ratios", divides_by_zero, r"All weights of parameter 0 are zero.*return 1\.0"),
    ("clipping.trust_ratios", keeps_the_last_slice, r"this keeps the last"),
    ("clipping.trust_ratios", adds_norms_of_ranks, r"That adds norms"),
    ("clipping.trust_ratios", a_call_for_each_parameter, r"makes 4 calls for 2 parameters"),
    ("clipping.trust_ratios", only_owners_of_it_call, r"do not make the same calls"),
    ("clipping.trust_ratios", one_for_each_parameter, r"It must return one for each"),
]
