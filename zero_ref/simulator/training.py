"""The description of a training run: the fields of a `Scenario`, each with what people may ask for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from zero_ref.plan.partition import check_world_size
from zero_ref.simulator.activations import ATTENTION, CHECKPOINTING, kinds_apart
from zero_ref.simulator.autocast import AUTOCAST
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.device import ATTENTION_KERNELS
from zero_ref.simulator.devices import DEVICES
from zero_ref.simulator.ledger import EIGHT_BIT_BLOCK, STATE_RULES, state_rule
from zero_ref.simulator.lora import LORA_ON
from zero_ref.simulator.models import Architecture
from zero_ref.simulator.norms import NORMS
from zero_ref.simulator.offload import OFFLOADS
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.options import Option, check_options, explained, listed
from zero_ref.simulator.peak import ALLOCATORS
from zero_ref.simulator.recipe import REDUCED_IN, Recipe
from zero_ref.simulator.schedule import MIB
from zero_ref.simulator.spread import DEFAULT, KINDS
from zero_ref.simulator.traced import Traced
from zero_ref.simulator.updates import UPDATES, update_kernels

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element in forward and backward. Of 16-bit parameters the optimizer keeps float32 copies."""

IN_8_BITS = ("Adam", "AdamW", "SGD+momentum", "RMSprop")
"""Optimizers with a version whose moments have 8 bits: bitsandbytes has Adam8bit, AdamW8bit, SGD8bit and
RMSprop8bit, torchao the first two."""

LONGEST_SEQUENCE = 8192
"""The most tokens in a sequence unless the caller asks for more. Models with a context of 100,000 tokens were
trained on shorter sequences first."""

MOST_PASSES = 1024
"""The most passes of an update that a command line takes, since all of them are played."""


# Which strategies use an option. Functions by name: a lambda inside an annotation would not see this module.


def _buckets_by_ddp(how: Recipe, _: object) -> bool:
    return how.stage < 2


def _reduces_in_buckets(how: Recipe, _: object) -> bool:
    return how.stage < 3


def _reduces_in_any_dtype(how: Recipe, _: object) -> bool:
    return how.reduces_in_any_dtype


def _offloads(how: Recipe, _: object) -> bool:
    return how.offloads


def _in_groups(how: Recipe, _: object) -> bool:
    return how.in_groups


def _gathers_ahead(how: Recipe, _: object) -> bool:
    return how.stage == 3 and not how.is_stair


def _averages(how: Recipe, _: object) -> bool:
    return how.averaging is not None


@dataclass(frozen=True)
class Training:
    """A model, a cluster, and how the model is trained on it. `Scenario` says what the fields mean.

    Raises:
        ValueError: as `Scenario`.
    """

    architecture: Architecture
    cluster: Cluster
    world_size: int
    # An entry for each option, as in a table.
    # fmt: off
    batch: Annotated[int, Option(
        "sequences a rank (default: %(default)s)", metavar="B", least=1, most=10**9,
        label="sequences of a rank", steps=(1, 2, 4, 8, 16, 32, 64), after="loss_dtype",
    )] = 1
    sequence: Annotated[int | None, Option(
        "tokens in each sequence (default: the model's, " + str(LONGEST_SEQUENCE) + " at most)", metavar="S",
        least=1, most=10**9, label="tokens in each",
        steps=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    )] = None
    _: KW_ONLY
    dtype: Annotated[str, Option(
        "of parameters and gradients: " + listed(DTYPES) + ". Of 16-bit parameters the optimizer keeps "
        "32-bit masters (default: %(default)s)",
        metavar="DTYPE", choices=DTYPES,
    )] = "bfloat16"
    optimizer: Annotated[str, Option(
        listed(STATE_RULES) + " (default: %(default)s)", metavar="NAME", choices=STATE_RULES,
    )] = "AdamW"
    masters: Annotated[bool, Option(
        "no 32-bit copies of 16-bit parameters: state in the parameters' own dtype",
    )] = True
    masters_16: Annotated[bool, Option(
        "the copies of 16-bit parameters, and the moments, have 16 bits too, as under DeepSpeed's "
        "bf16_master_weights_and_grads with bf16_optimizer_states",
    )] = False
    states_8: Annotated[bool, Option(
        "moments have 8 bits and a scale for each " + str(EIGHT_BIT_BLOCK) + " elements, as those of "
        "bitsandbytes' and torchao's AdamW8bit; masters stay as they are",
    )] = False
    lora: Annotated[int | None, Option(
        "LoRA: only adapters of this rank are trained, beside frozen weights", metavar="RANK", least=1,
        most=2**20,
    )] = None
    lora_on: Annotated[str, Option(
        "which weights have adapters: " + explained(LORA_ON) + " (default: %(default)s)", metavar="WHERE",
        choices=LORA_ON,
    )] = "all-linear"
    update: Annotated[str, Option(
        explained(UPDATES) + " (default: %(default)s)", metavar="HOW", choices=UPDATES,
    )] = "fused"
    compiled: Annotated[bool, Option("blocks are compiled: fewer passes over memory, less is kept")] = False
    program: Annotated[str, Option(
        "the kind of program, by which the intervals of predictions differ: " + explained(KINDS)
        + " (default: %(default)s)",
        metavar="KIND", choices=KINDS,
    )] = DEFAULT
    vendor_kernels: Annotated[bool, Option(
        "norms, rotary positions and gates are one kernel each, as in Transformer Engine and Megatron-LM",
    )] = False
    fused_loss: Annotated[bool, Option(
        "the cross-entropy is one kernel, which keeps no copy of the logits in 32 bits",
    )] = False
    kept_logits: Annotated[bool, Option(
        "the program keeps the model's output, as one of Hugging Face's: its logits in 32 bits are there "
        "until backward ends",
    )] = False
    allocator: Annotated[str, Option(
        "how PyTorch's allocator takes memory: " + explained(ALLOCATORS) + " (default: %(default)s)",
        metavar="HOW", choices=ALLOCATORS,
    )] = "expandable"
    norms: Annotated[str, Option(
        "RMSNorms: " + explained(NORMS) + " (default: %(default)s)", metavar="HOW", choices=NORMS,
    )] = "fused"
    repeated_kv: Annotated[bool, Option(
        "keys and values are copied for every query head before attention, as before torch had grouped heads",
    )] = False
    silu_by_hand: Annotated[bool, Option(
        "the SiLU of a gated MLP is x * sigmoid(x), which keeps the sigmoid too",
    )] = False
    loss_dtype: Annotated[str, Option(
        "what a loss that is not fused is computed in (default: %(default)s)", metavar="DTYPE",
        choices=DTYPES,
    )] = "float32"
    checkpointing: Annotated[str, Option(
        explained(CHECKPOINTING) + " (default: %(default)s)",
        metavar="WHAT", choices=CHECKPOINTING, label="computed again", offered=kinds_apart("fused"),
    )] = "none"
    attention: Annotated[str, Option(
        explained(ATTENTION) + " (default: %(default)s)", metavar="HOW", choices=ATTENTION,
    )] = "fused"
    attention_kernel: Annotated[str | None, Option(
        "of fused attention: " + explained(ATTENTION_KERNELS)
        + " (default: FlashAttention-2, and cuDNN's on B200, GB200 and GB300)",
        metavar="KERNEL", choices=ATTENTION_KERNELS,
    )] = None
    autocast: Annotated[str | None, Option(
        "torch.autocast over float32 parameters: matrix products are computed in this dtype, and weights are "
        "cast to it in each forward: " + listed(AUTOCAST), metavar="DTYPE", choices=AUTOCAST,
    )] = None
    tf32: Annotated[bool, Option(
        "matrix products of float32 are computed in TF32, as after "
        "torch.set_float32_matmul_precision('high'); torch's default is float32",
    )] = False
    fp8: Annotated[bool, Option(
        "matrix products of blocks are computed in FP8, as by torchao: operands are cast for each, and kept "
        "in 16 bits",
    )] = False
    accumulation: Annotated[int, Option(
        "forwards and backwards before an update, each of --batch sequences (default: %(default)s)",
        metavar="N", least=1, most=MOST_PASSES,
    )] = 1
    way: Annotated[str, Option(
        explained(WAYS), name="overlap", metavar="WAY", choices=WAYS, used_by=Recipe.takes_way,
    )] = "plain"
    bucket_bytes: Annotated[int | None, Option(
        "of DDP's buckets (default: 25, the first 1), and of zero-2's ranges (default: 4,194,304 elements)",
        name="bucket_mib", metavar="MIB", unit=MIB, above=0, most=2**20, used_by=_reduces_in_buckets,
    )] = None
    bucket_view: Annotated[bool, Option(
        "DDP's gradient_as_bucket_view: gradients lie in DDP's buckets, and are not kept twice",
        used_by=_buckets_by_ddp,
    )] = False
    without_ddp: Annotated[bool, Option(
        "gradients are reduced where they lie, by the program itself: no buckets of DDP",
        used_by=_buckets_by_ddp,
    )] = False
    gradient_dtype: Annotated[str | None, Option(
        "what gradients are added up and kept in: float32 beside 16-bit parameters, as Megatron-LM's "
        "main_grad (default: --dtype)", metavar="DTYPE", choices=DTYPES, used_by=_reduces_in_any_dtype,
    )] = None
    reduce_dtype: Annotated[str | None, Option(
        "what gradients travel in: " + listed(REDUCED_IN) + " (default: --gradient-dtype)", metavar="DTYPE",
        choices=REDUCED_IN, used_by=_reduces_in_any_dtype,
    )] = None
    offload: Annotated[str | None, Option(
        explained(OFFLOADS), metavar="WHAT", choices=OFFLOADS, used_by=_offloads,
    )] = None
    offload_fraction: Annotated[float, Option(
        "of --offload: the part of the elements whose state is on the CPU; the GPU updates the others at the "
        "same time (default: %(default)s)",
        metavar="SHARE", above=0, most=1, used_by=_offloads,
    )] = 1.0
    no_sync: Annotated[bool, Option(
        "of zero-2 and zero-3: accumulated gradients are whole on each rank until the last backward",
        used_by=_in_groups,
    )] = False
    all_reduce_last: Annotated[bool, Option(
        "of zero-3 with --shard-group: accumulated gradients are all-reduced between the groups once an "
        "update, as by fully_shard's set_requires_all_reduce", used_by=_gathers_ahead,
    )] = False
    shard_group: Annotated[int | None, Option(
        "of zero-2 and zero-3: so many consecutive ranks share what is sharded, as a node's (default: all)",
        metavar="N", least=1, most=2**20, used_by=_in_groups,
    )] = None
    prefetch: Annotated[int, Option(
        "of zero-3: units gathered ahead of the one that computes (default: %(default)s)", metavar="UNITS",
        least=0, most=10**6, used_by=_gathers_ahead,
    )] = 1
    gather_modules: Annotated[bool, Option(
        "of zero-3: parameters are gathered module by module, as by DeepSpeed, and not block by block. "
        "Memory is counted for blocks", used_by=_gathers_ahead,
    )] = False
    live_parameters: Annotated[int | None, Option(
        "of zero-3: gathered parameters that stay whole, as DeepSpeed's stage3_max_live_parameters "
        "(default: those of --prefetch)", metavar="P", least=0, most=10**13, used_by=_gathers_ahead,
    )] = None
    period: Annotated[int, Option(
        "of local-sgd: steps from one average of the parameters to the next (default: %(default)s)",
        metavar="H", least=1, most=10**6, used_by=_averages,
    )] = 8
    gradient_group: Annotated[int, Option(
        "of local-sgd: average gradients in every step over so many ranks, as of a node "
        "(default: %(default)s)",
        metavar="N", least=1, most=2**20, used_by=_averages,
    )] = 1
    # fmt: on

    def __post_init__(self) -> None:
        if self.batch < 1 or self.tokens_of_sequence < 1:
            raise ValueError(
                f"batch and sequence must be at least 1, got {self.batch} and {self.tokens_of_sequence}."
            )
        check_options(self, but=("optimizer",))  # `state_rule` knows them
        if self.offload and state_rule(self.optimizer).of_whole is not None:
            raise ValueError(f"offload is for elementwise optimizers; {self.optimizer} multiplies matrices.")
        if self.offload_fraction > 1 or (self.offload is None and self.offload_fraction < 1):
            raise ValueError(
                f"offload_fraction is the share, at most 1, of what offload puts on the CPU; got "
                f"{self.offload_fraction:g} with offload {self.offload}."
            )
        if self.update != "fused":
            update_kernels(self.optimizer, self.update)
        check_world_size(self.world_size)
        self._check_products()
        if self.masters_16 and not (self.masters and DTYPES[self.dtype] == 2):
            raise ValueError(
                "masters_16 is for copies of 16-bit parameters: ask for a dtype of 16 bits, with masters."
            )
        if self.states_8:
            self._check_8_bits()
        if isinstance(self.architecture, Traced):
            self._check_traced(self.architecture)
        if self.lora is not None:
            self._check_adapters()
        elif self.lora_on != "all-linear":
            raise ValueError(
                f"lora_on {self.lora_on} says where adapters are, and lora, their rank, is not given."
            )

    def _check_8_bits(self) -> None:
        """Refuse moments in 8 bits where there are none."""
        if self.optimizer not in IN_8_BITS:
            raise ValueError(
                f"states_8: there is no {self.optimizer} with moments of 8 bits; there is one of "
                f"{', '.join(IN_8_BITS)}."
            )
        if self.masters_16:
            raise ValueError("states_8 and masters_16 both say how many bits moments have: leave one out.")
        if self.update != "fused":
            raise ValueError(
                f"states_8 beside update {self.update}: moments of 8 bits have kernels of their own, one for "
                "each tensor. Leave the update fused."
            )
        if self.offload is not None:
            raise ValueError(
                f"states_8 beside offload {self.offload}: the CPU's update of moments of 8 bits is not "
                "simulated. Leave one out."
            )

    def _check_traced(self, model: Traced) -> None:
        """Refuse what a trace does not have."""
        if model.dtype != self.dtype:
            raise ValueError(
                f"the model was traced in {model.dtype}, and the dtype is {self.dtype}: trace it anew."
            )
        if self.autocast is not None:
            raise ValueError("autocast is not traced: leave it out, and ask for --dtype bfloat16 or float32.")
        if self.lora is not None:
            raise ValueError(
                "lora is not added to a module that is traced: build it with its adapters, and with "
                "requires_grad False where it is frozen. To a --config adapters are added."
            )

    def _check_adapters(self) -> None:
        """Refuse LoRA where it is not simulated."""
        named = f"lora of rank {self.lora}"
        layers = getattr(self.architecture, "layers", None)
        if layers is None or any(one.mixed is not None or one.mlp is not None for one in layers):
            raise ValueError(f"{named} is for transformers whose blocks have attention and a dense MLP.")
        if self.fp8 or state_rule(self.optimizer).of_whole is not None:
            raise ValueError(
                f"{named} is not simulated with fp8, or with {self.optimizer}: leave fp8 out, and take an "
                "elementwise optimizer."
            )
        if self.cluster.device.memory_reached is None:
            raise ValueError(
                f"{named} is not simulated on {self.cluster.device.name}, whose rate is of training all "
                "parameters: choose another cluster."
            )

    def _check_products(self) -> None:
        """Refuse products that there are not."""
        device = self.cluster.device
        if self.autocast and self.dtype != "float32":
            raise ValueError(
                f"autocast casts parameters of float32; the dtype is {self.dtype}, and so are products. Ask "
                "for float32, or leave autocast out."
            )
        if self.gradient_dtype not in (None, self.dtype, "float32"):
            raise ValueError(
                f"gradient_dtype {self.gradient_dtype} beside parameters of {self.dtype}: gradients are kept "
                "in the parameters' dtype, or in float32."
            )
        if self.attention_kernel is not None:
            if self.attention != "fused":
                raise ValueError(
                    f"attention_kernel {self.attention_kernel} is of fused attention; attention is "
                    f"{self.attention}."
                )
            device.with_attention(self.attention_kernel)
        if self.tf32 and self.computed_in != "float32":
            raise ValueError(f"tf32 is how products of float32 are made; the dtype is {self.computed_in}.")
        if self.tf32 and "tf32" not in device.peaks:
            raise ValueError(f"{device.name}: no peak in TF32 is known.")
        if self.fp8 and DTYPES[self.computed_in] != 2:
            raise ValueError(
                f"fp8 casts operands of 16 bits; products are in {self.computed_in}. Ask for bfloat16, or "
                "for autocast."
            )
        if self.fp8 and not hasattr(self.architecture, "layers"):
            raise ValueError("fp8 is for transformers, whose products are known; this model is none.")
        if self.fp8 and "fp8" not in device.peaks:
            known = [one for one, each in DEVICES.items() if "fp8" in each.get("peaks", ())]
            raise ValueError(f"{device.name}: no peak in FP8 is known. It is of {', '.join(known)}.")

    @property
    def computed_in(self) -> str:
        """The dtype of products: what they are cast to, or that of the parameters."""
        return self.autocast or self.dtype

    @property
    def tokens_of_sequence(self) -> int:
        if self.sequence is not None:
            return self.sequence
        return min(getattr(self.architecture, "positions", 1), LONGEST_SEQUENCE)

    @property
    def tokens(self) -> int:
        """Tokens of one rank in one iteration. An example for a model that is no transformer is one token."""
        return self.accumulation * self.tokens_of_pass

    @property
    def tokens_of_pass(self) -> int:
        """Tokens of one rank in one forward and backward; `accumulation` of these make an iteration."""
        return self.batch * self.tokens_of_sequence
