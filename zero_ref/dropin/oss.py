"""FairScale's OSS as a form of `ZeroRedundancyOptimizer`: a program written for OSS changes one import.

    from zero_ref import OSS                    # was: from fairscale.optim import OSS

OSS (optimizer state sharding) was the first public implementation of ZeRO's stage 1, which `stairs/owners.py`
shows; its repository is archived. This module adds FairScale's names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import SGD, Optimizer

from zero_ref.clip.grad_norm import clip_grad_norm_, get_total_norm
from zero_ref.comm.collectives import Collectives
from zero_ref.optimizer.registered import Options
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.groups import ParamGroup, options_of


class ParamBucket(NamedTuple):
    """The trained parameters of one rank on one device.

    Args:
        buffers: one (numel,) tensor for each dtype.
        params: the parameters, which are views of the buffers.
    """

    buffers: tuple[torch.Tensor, ...]
    params: tuple[torch.Tensor, ...]

    @property
    def buffer(self) -> torch.Tensor:
        """The buffer of a bucket that has only one.

        Raises:
            RuntimeError: there are several buffers, as the parameters have several dtypes.
        """
        if len(self.buffers) > 1:
            raise RuntimeError(
                f"this bucket has parameters of {len(self.buffers)} dtypes, each in a tensor of its own: "
                "use `buffers`."
            )
        return self.buffers[0]


class OSS(ZeroRedundancyOptimizer):
    """Shards an optimizer over the ranks of a group. A drop-in for fairscale.optim.OSS.

    >>> optimizer = OSS(ddp.parameters(), torch.optim.Adam, lr=1e-3)             # doctest: +SKIP

    Unlike with FairScale's, parameters may have several dtypes, loading does not change the caller's state
    dict, and the next step sees a change of `requires_grad` by itself. All ranks call `load_state_dict`
    together, and `state_dict` refuses to return a state from before the last step. As with FairScale's,
    parameters become views of flat tensors: save a part of the model as
    `{name: value.clone() for name, value in part.state_dict().items()}`.

    Args:
        params, optim, group: as `params`, `optimizer_class`, `process_group` of `ZeroRedundancyOptimizer`.
        broadcast_buffer_size, force_broadcast_object: accepted and not used.
        broadcast_fp16: `step` sends new parameters as float16. Unlike with FairScale's, the owner keeps its
            own values in full precision, so that small updates add up; the other ranks, and a model that one
            rank saves, have rounded values. May be set later, on all ranks. A step waits for the GPU to check
            for values beyond 65504, which are an error on all ranks.
        broadcast_dtype: the same with another dtype, such as torch.bfloat16, which has the range of float32.
        **default: passed to `optim`.

    Attributes:
        optim, rank, world_size, global_rank: as `ZeroRedundancyOptimizer`.
        group: the process group.

    Raises:
        ValueError: both `broadcast_fp16` and `broadcast_dtype` are given; or as `ZeroRedundancyOptimizer`.
    Collective, Cost: as `ZeroRedundancyOptimizer`, one message from each owner in a step.
    Source: the interface and the partition rule of fairscale.optim.OSS 0.4.13.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = SGD,
        group: dist.ProcessGroup | Collectives | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        *,
        broadcast_dtype: torch.dtype | None = None,
        **default: Any,
    ) -> None:
        self.make_options = partial(_options, broadcast_fp16, broadcast_dtype)
        super().__init__(
            params,
            optim,
            group,
            parameters_as_bucket_view=True,
            partition="registration_greedy",
            **default,
        )

    @property
    def group(self) -> dist.ProcessGroup | Collectives | None:
        return self.process_group

    @property
    def broadcast_dtype(self) -> torch.dtype | None:
        """The dtype in which `step` sends new parameters; None for their own."""
        return self.registered.options.broadcast_dtype

    @property
    def broadcast_fp16(self) -> bool:
        """Whether new parameters are sent as float16."""
        return self.broadcast_dtype == torch.float16

    @broadcast_fp16.setter
    def broadcast_fp16(self, wanted: bool) -> None:
        dtype = torch.float16 if wanted else None
        self.registered.options = replace(self.registered.options, broadcast_dtype=dtype)

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each rank: all options, and the parameters that the rank owns.

        Parameters are assigned in registration order, each to the rank with the fewest trained elements so
        far.

        >>> from zero_ref.lab import virtual
        >>> def on_rank(comm):
        ...     weights = [torch.nn.Parameter(torch.zeros(numel)) for numel in (6, 5, 4, 1)]
        ...     first, second = OSS(weights, group=comm).partition_parameters()
        ...     return [len(param) for param in first[0]["params"]], len(second[0]["params"])
        >>> virtual.run(on_rank, 2)[0]
        ([6, 1], 2)
        """
        rank_of_param = self._param_to_rank

        def owned_by(rank: int, group: ParamGroup) -> ParamGroup:
            params = [param for param in group["params"] if rank_of_param[param] == rank]
            return {**options_of(group), "params": params}

        return [[owned_by(rank, group) for group in self.param_groups] for rank in range(self.world_size)]

    @property
    def buckets(self) -> dict[torch.device, dict[int, ParamBucket]]:
        """The flat tensors of trained parameters, by device and by rank."""
        params = self.built.params
        # One message of a step holds the parameters of one owner, device and dtype. A bucket joins its
        # dtypes.
        of_device: dict[torch.device, dict[int, ParamBucket]] = {}
        for message in self.built.messages:
            of_rank = of_device.setdefault(message.tensor.device, {})
            before = of_rank.get(message.owner, ParamBucket((), ()))
            of_rank[message.owner] = ParamBucket(
                (*before.buffers, message.tensor),
                (*before.params, *(params[piece.param] for piece in message.slices)),
            )
        return of_device

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """Each parameter's owner. fairscale.nn.ShardedDataParallel reads this and `_per_device_params`."""
        return dict(zip(self.built.params, self.partition.owner_of_param, strict=True))

    @property
    def _per_device_params(self) -> dict[torch.device, list[list[torch.Tensor]]]:
        of_device: dict[torch.device, list[list[torch.Tensor]]] = {}
        for param, rank in self._param_to_rank.items():
            of_device.setdefault(param.device, [[] for _ in range(self.world_size)])[rank].append(param)
        return of_device

    def refresh_trainable(self) -> None:
        """Make a new plan if parameters were frozen, unfrozen or moved, as the next step would do by itself.

        Collective: all ranks of the group.
        Cost: one all-gather of 32 bytes if `requires_grad` or a dtype has changed, else nothing.
        """
        self.current()

    # ---------------------------------------------------------------------------------------------- clipping

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Scale all gradients by one factor, so that their norm is at most `max_norm`.

        Args:
            max_norm, norm_type: as `torch.nn.utils.clip_grad_norm_`; `norm_type` may be infinity.
            filter_params_fn: takes the trained parameters and returns those whose gradients count in the
                norm, the same ones on every rank. All gradients are scaled.
        Returns:
            The norm before clipping, shape (), the same on all ranks.
        Raises, Collective, Cost: as `zero_ref.clip_grad_norm_`, over the ranks of `group`. FairScale's is
            over all ranks.
        """
        if filter_params_fn is None:
            return clip_grad_norm_(self, max_norm, norm_type)

        # A generator, so that `get_total_norm` runs the filter where an error of one rank makes all ranks
        # raise.
        def params_to_count() -> Iterator[torch.Tensor]:
            yield from filter_params_fn([param for param in self.built.params if param.requires_grad])

        total = get_total_norm(self, norm_type, params=params_to_count())
        clip_grads_with_norm_(self.built.params, float(max_norm), total)
        return total

    def consolidate_state_dict(self, recipient_rank: int | Literal["all"] = 0) -> None:
        """Gather the optimizer state onto one rank of the group, or onto all.

        Args:
            recipient_rank: a rank of the group; -1 or "all" for all ranks.
        Raises, Collective, Cost: as `ZeroRedundancyOptimizer.consolidate_state_dict`.
        """
        super().consolidate_state_dict("all" if recipient_rank == -1 else recipient_rank)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The state of the unsharded optimizer, on ranks onto which it was gathered.

        Args:
            all_ranks: gather the state onto all ranks first.
        Raises:
            RuntimeError: the state was not gathered onto this rank since the last step.
        Collective: with `all_ranks=True` all ranks of the group, otherwise none.
        """
        if all_ranks:
            self.consolidate_state_dict(-1)
        return super().state_dict()


def _options(broadcast_fp16: bool, broadcast_dtype: torch.dtype | None, **of_optimizer: Any) -> Options:
    """The options of an optimizer that has those of OSS, too; called where an error reaches all ranks."""
    if broadcast_fp16 and broadcast_dtype is not None:
        raise ValueError(
            f"broadcast_fp16=True and broadcast_dtype={broadcast_dtype} both name a dtype in which to "
            "send parameters; pass one of them."
        )
    return Options(**of_optimizer, broadcast_dtype=torch.float16 if broadcast_fp16 else broadcast_dtype)
