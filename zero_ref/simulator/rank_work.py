"""The parameters, activations and kernels of one rank, whatever the strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.activations import Activations, activations
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.kernels import Kernels, kernels
from zero_ref.simulator.ledger import EIGHT_BIT_BYTES, StateRule, state_rule
from zero_ref.simulator.lora import Lora, is_adapter, with_adapters
from zero_ref.simulator.models import GPT2, Llama, Mixture, ParamShape, matrices_whole, specs
from zero_ref.simulator.price import Workload
from zero_ref.simulator.traced import Traced
from zero_ref.simulator.training import DTYPES, Training
from zero_ref.simulator.updates import update_kernels


@dataclass(frozen=True)
class RankWork(Training):
    """The part of a `Scenario` that is the same under every strategy.

    Raises:
        ValueError: as `Scenario`.
    """

    @cached_property
    def machine(self) -> Cluster:
        """The cluster with its devices' peak in the dtype of the products.

        >>> from zero_ref.simulator.cluster import cluster
        >>> from zero_ref.simulator.models import MODELS
        >>> from zero_ref.simulator.scenario import Scenario
        >>> for options in ({}, {"dtype": "float32"}, {"dtype": "float32", "tf32": True}):
        ...     Scenario(MODELS["gpt2"], cluster("h100-ib"), 2, **options).machine.device.tflops
        989
        67
        494.5
        """
        device = self.cluster.device.in_dtype("tf32" if self.tf32 else self.computed_in)
        if self.attention_kernel is not None:
            device = device.with_attention(self.attention_kernel)
        return self.cluster if device is self.cluster.device else replace(self.cluster, device=device)

    @property
    def transformer(self) -> GPT2 | Llama | Mixture | Traced | None:
        """The architecture, if its work is known: a transformer's, or that of a model that was traced."""
        model = self.architecture
        return model if isinstance(model, (GPT2, Llama, Mixture, Traced)) else None

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained beside frozen weights; None where all parameters are trained."""
        return None if self.lora is None else Lora(self.lora, self.lora_on)

    @cached_property
    def shapes(self) -> tuple[ParamShape, ...]:
        """The parameters, with the adapters beside frozen ones."""
        shapes = self.architecture.shapes()
        return shapes if self.adapters is None else with_adapters(shapes, self.adapters)

    @cached_property
    def params(self) -> list[ParamSpec]:
        """The model's parameters."""
        params = specs(self.shapes, self.dtype)
        if self.lora is not None:
            return [param._replace(trainable=is_adapter(param.name)) for param in params]
        params = params if state_rule(self.optimizer).of_whole is None else matrices_whole(params)
        if isinstance(self.architecture, Traced):
            frozen = self.architecture.frozen
            params = [param._replace(trainable=param.name not in frozen) for param in params]
        return params

    @cached_property
    def numel(self) -> int:
        """Elements of the model."""
        return sum(shape.numel for shape in self.shapes)

    @cached_property
    def trained_numel(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(param.numel for param in self.params if param.trainable)

    @property
    def active(self) -> int:
        """Parameters that a token goes through: of experts those that it is sent to."""
        model = self.transformer
        if model is None:
            return self.numel
        return model.active + (0 if self.lora is None else self.trained_numel)

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts of the model that activations and time do not count, in words for people."""
        model = self.transformer
        return model.missing if isinstance(model, Traced) else ()

    @cached_property
    def activations(self) -> Activations:
        """Activations of one rank; those of a model that is no transformer are not counted, and so 0."""
        if (model := self.transformer) is None:
            return Activations()
        return activations(
            model,
            self.batch,
            self.tokens_of_sequence,
            self.checkpointing,
            attention=self.attention,
            itemsize=DTYPES[self.computed_in],
            autocast=self.autocast is not None,
            lora=self.adapters,
            compiled=self.compiled,
            fused_loss=self.fused_loss,
            loss_itemsize=DTYPES[self.loss_dtype],
            norms=self.norms,
            repeated_kv=self.repeated_kv,
            silu_by_hand=self.silu_by_hand,
        )

    @property
    def activation_bytes(self) -> int:
        """The bytes that forward leaves for backward on one rank."""
        return self.activations.kept

    @property
    def output_bytes(self) -> int:
        """Bytes of the logits that the program keeps in 32 bits until backward ends."""
        if not self.kept_logits or (model := self.transformer) is None:
            return 0
        outputs = model.outputs if isinstance(model, Traced) else model.vocabulary
        return 4 * self.tokens_of_pass * outputs

    @property
    def attention_share(self) -> float:
        """The operations that attention adds to forward and backward, as a share of the parameters'.

        >>> from zero_ref.simulator.cluster import cluster
        >>> from zero_ref.simulator.models import MODELS
        >>> from zero_ref.simulator.scenario import Scenario
        >>> round(Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 8).attention_share, 2)
        0.27

        The whole of each sequence counts, or the whole window that a block sees. Kernels that skip what a
        causal mask hides need half: `kernels`.

        Source: appendix B of PaLM (arXiv:2204.02311), which counts 6 N + 12 L H Q T for each token.
        """
        if (model := self.transformer) is None:
            return 0.0
        if isinstance(model, Traced):
            return model.attention_share(self.batch, self.tokens_of_sequence)
        seen = (
            layer.number * layer.heads * (layer.head_width + layer.value_width)
            * min(layer.window or self.tokens_of_sequence, self.tokens_of_sequence)
            for layer in model.layers
        )  # fmt: skip
        return sum(seen) / self.active

    def utilisation_at(self, iteration_ms: float) -> float:
        """Model FLOPs utilisation, if an iteration takes so long; see `SimulatedRun.utilisation`."""
        of_token = 6 * self.active * (1 + self.attention_share)
        if isinstance(model := self.architecture, Traced):
            of_token = model.flops_of_token(self.batch, self.tokens_of_sequence)
        if self.lora is not None:  # of frozen parameters no gradients are made
            of_token -= 2 * (self.active - self.trained_numel)
        return of_token * self.tokens / (iteration_ms * self.machine.device.tflops * 1e9)

    @cached_property
    def kernels(self) -> Kernels | None:
        """The work of forward and backward of a micro-batch; None for a model that is no transformer."""
        if (model := self.transformer) is None:
            return None
        return kernels(
            model,
            self.batch,
            self.tokens_of_sequence,
            self.checkpointing,
            attention=self.attention,
            compiled=self.compiled,
            vendor=self.vendor_kernels,
            fused_loss=self.fused_loss,
            itemsize=DTYPES[self.computed_in],
            autocast=self.autocast is not None,
            fp8=self.fp8,
            lora=self.adapters,
        )

    @property
    def workload(self) -> Workload:
        """The work of forward and backward, and the bytes that an update reads and writes."""
        return Workload(
            self.tokens_of_pass,
            recompute=self.checkpointing == "full",
            step_bytes=self.step_bytes(DTYPES[self.gradient_dtype or self.dtype]),
            attention_share=self.attention_share,
            kernels=self.kernels,
            active_share=self.active / self.numel,
        )

    def step_bytes(self, gradient_itemsize: int, update: str | None = None) -> float:
        """Bytes that an update reads and writes for each element, given those of an element of the gradients.

        Args:
            update: one of `updates.UPDATES`; None for the scenario's own.

        >>> from zero_ref.simulator.cluster import cluster
        >>> from zero_ref.simulator.models import MODELS
        >>> from zero_ref.simulator.scenario import Scenario
        >>> scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), 2)
        >>> scenario.step_bytes(2), scenario.step_bytes(4), replace(scenario, states_8=True).step_bytes(2)
        (28, 30, 16.0625)

        A fused one beside 32-bit masters reads gradients as they are, and writes 16-bit parameters beside
        the masters, as the kernels of Apex do. Else gradients are first converted to 32 bits, and parameters
        from them at the end: 6 bytes each. torch's own fused kernels need that too: `peak` counts the memory
        of the converted gradients for every kernel, and the time of a fused one leaves these 12 bytes out.
        """
        itemsize = DTYPES[self.dtype]
        update = update or self.update
        of_kernels: float = self._state_itemsize * update_kernels(self.optimizer, update).touched
        if self.states_8:  # each moment is read and written
            of_kernels -= 2 * state_rule(self.optimizer).tensors * (self._state_itemsize - EIGHT_BIT_BYTES)
        if not self._mixed:
            return of_kernels + gradient_itemsize - itemsize
        if update == "fused":
            return of_kernels + gradient_itemsize - self._state_itemsize + itemsize
        converted = gradient_itemsize != self._state_itemsize
        of_gradients = (gradient_itemsize + self._state_itemsize) * converted
        return of_kernels + of_gradients + self._state_itemsize + itemsize

    @property
    def state(self) -> StateRule:
        """The optimizer's state. Beside 16-bit parameters it has `masters` of them, and is in their dtype.

        With `states_8` the moments are in 8 bits.
        """
        rule = state_rule(self.optimizer)
        rule = rule.in_8_bits() if self.states_8 else rule
        return rule.with_master(self._state_itemsize) if self._mixed else rule

    @property
    def _mixed(self) -> bool:
        return self.masters and DTYPES[self.dtype] == 2

    @property
    def _tied(self) -> bool:
        """The output head is the embedding."""
        model = self.transformer
        return model is not None and model.tied

    @property
    def _state_itemsize(self) -> int:
        """Bytes of an element of the state, and of parameters as local-sgd averages them.

        Moments in 8 bits have fewer.
        """
        return 4 if self._mixed and not self.masters_16 else DTYPES[self.dtype]
