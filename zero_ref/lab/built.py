"""Models to trace, built on the meta device: by one's own function, or by transformers from a config.json."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero_ref.lab.noted_run import Inputs
from zero_ref.lab.on_meta import seeing
from zero_ref.lab.tracing import trace
from zero_ref.simulator.lora import Lora
from zero_ref.simulator.traced import Traced

LONGEST = 8192
"""The longest sequence that a model is traced with unless another is asked for."""

SHORT = 1024
"""The same for a module of one's own, which does not say how many positions it has."""

WITHOUT_TEXT = 1
"""Tokens of what is no text: an image is one."""


def from_factory(build: Callable[[], Any], dtype: str, sequence: int | None = None) -> Traced:
    """Trace what a function builds.

    Args:
        build: returns a module; or a module, and a function of a batch and a length that makes its inputs: a
            mapping of keywords, a tuple, or one tensor. Without it a module is given `(batch, length)`
            tokens, and one of transformers labels too. The meta device is the default one in both.
        dtype: to which the module's parameters are converted.
        sequence: tokens in each sequence; None for SHORT, or for as many as a model of transformers has.
    Raises:
        ValueError: `build` returns something else, or the module cannot be traced.
    """
    with torch.device("meta"):
        built = build()
    module, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(module, nn.Module) or not (inputs is None or callable(inputs)):
        raise ValueError(
            "the function must return a torch.nn.Module, or one and a function of a batch and a length that "
            f"makes its inputs; it returned {type(built).__name__}."
        )
    module = module.to(device="meta", dtype=getattr(torch, dtype)).train()
    if inputs is None and hasattr(module, "config") and hasattr(module, "main_input_name"):
        return _of_transformers(module, sequence)
    return trace(module, inputs or _tokens, sequence or SHORT)


def from_config(
    config: Mapping[str, Any], dtype: str, sequence: int | None = None, lora: Lora | None = None
) -> Traced:
    """Trace the model that transformers builds from a config.json.

    Args:
        config: as published. Weights that are stored in few bits are as if they were of `dtype`.
        dtype: of all parameters.
        sequence: tokens in each sequence; None for the model's, LONGEST at most.
        lora: adapters, which alone are trained; None to train all.
    Raises:
        ValueError: the installed transformers knows no such model, or cannot build it or run it on the meta
            device; or it has no matrix for an adapter.
        ModuleNotFoundError: transformers is not installed.
    """
    module = built(config, dtype)
    if lora is not None:
        adapt(module, lora)
    return _of_transformers(module, sequence)


def adapt(module: nn.Module, lora: Lora) -> None:
    """Freeze a model, and give the matrices of its blocks adapters that are trained, named as by `lora`.

    Experts whose matrices are one tensor get none, as with peft.

    Raises:
        ValueError: no block has a matrix that is a module.
    """
    module.requires_grad_(False)
    adapted = 0
    for name, one in list(module.named_modules()):
        in_block = any(part.isdecimal() for part in name.split("."))
        is_matrix = type(one).__name__ in ("Linear", "Conv1D")
        if not (in_block and is_matrix and (lora.on == "all-linear" or "att" in name)):
            continue
        weight: Any = one.weight
        shape = weight.shape if isinstance(one, nn.Linear) else weight.shape[::-1]  # Conv1D is transposed
        kind: Any = type(one)
        one.lora_A = nn.Linear(shape[1], lora.rank, bias=False, device="meta", dtype=weight.dtype)
        one.lora_B = nn.Linear(lora.rank, shape[0], bias=False, device="meta", dtype=weight.dtype)
        one.__class__ = type(kind.__name__, (_Adapted, kind), {})
        adapted += 1
    if not adapted:
        raise ValueError(
            f"lora on {lora.on}: no block of this model has a matrix that is a module of its own."
        )


class _Adapted(nn.Module):
    """A matrix whose result has that of its adapters added."""

    lora_A: nn.Linear
    lora_B: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, and the adapters'."""
        added: torch.Tensor = super().forward(x) + self.lora_B(self.lora_A(x))
        return added


def built(config: Mapping[str, Any], dtype: str = "bfloat16") -> nn.Module:
    """The model that transformers builds from a config.json, on the meta device.

    Raises:
        ValueError, ModuleNotFoundError: as `from_config`.
    """
    import transformers

    said = {key: value for key, value in copy.deepcopy(dict(config)).items() if key not in NOT_OF_THE_MODEL}
    for inside in said.values():
        if isinstance(inside, dict):
            inside.pop("quantization_config", None)
    kind = str(said.get("model_type"))
    kind = _MOVED.get((kind, "text_config" in said), kind)
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"model_type {kind!r} is not known to transformers {transformers.__version__}: take a newer "
            "one, or give the model's own code as --module."
        )
    try:
        with _quiet():
            made = transformers.CONFIG_MAPPING[kind].from_dict(said)
            for one in (made, *(getattr(made, name) for name in made.sub_configs)):
                if one is not None:
                    one.use_cache = False
            model = _class_of(transformers, made, said.get("architectures"))
            with torch.device("meta"):
                module = _made(model, made, getattr(torch, dtype)).train()
        _fuse(module)
        return module
    except (
        Exception
    ) as error:  # of whatever kind: the configuration is the reader's, and the code transformers'
        raise ValueError(
            f"transformers {transformers.__version__} cannot build this {kind}: "
            f"{type(error).__name__}: {error}"
        ) from error


NOT_OF_THE_MODEL = ("quantization_config", "compression_config", "auto_map", "torch_dtype", "dtype")
"""Entries of a configuration that say how weights are stored, or where code lies."""

_MOVED = {("ministral3", True): "mistral3", ("mimo", False): "qwen2"}
"""What transformers calls models of published files, by their name and whether they have a text inside."""


def _class_of(transformers: Any, made: Any, named: Any) -> Any:
    """The class of a configuration: as it says, or the first of these that there is."""
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and hasattr(found := getattr(transformers, name, None), "_from_config"):
            return found
        if not str(name).endswith("ForCausalLM"):
            raise ValueError(f"architectures has {name!r}, which is no class of it")
    for mapping in (
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    ):
        if type(made) in mapping:
            return mapping[type(made)]
    raise ValueError("no class takes this configuration")


def _made(model: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """The module, with fused attention and with one product for all experts where its class has these."""
    sdpa, grouped = {"attn_implementation": "sdpa"}, {"experts_implementation": "grouped_mm"}
    for options in ({**sdpa, **grouped}, grouped, sdpa):
        try:
            return model._from_config(copy.deepcopy(config), dtype=dtype, **options).to(dtype)
        except (ValueError, TypeError, ImportError):
            continue  # this class does not have both
    return model._from_config(config, dtype=dtype).to(dtype)


def _fuse(module: Any) -> None:
    """Let attention be fused where the class has flash attention, and torch's own lacks a cap or a sink."""
    if getattr(module, "_supports_flash_attn", False) and module.config._attn_implementation == "eager":
        module.config._attn_implementation = "sdpa"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what transformers says of special tokens and defaults from a table of numbers."""
    named = logging.getLogger("transformers")
    level = named.level
    named.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        named.setLevel(level)


def _of_transformers(module: Any, sequence: int | None) -> Traced:
    config = module.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    with _quiet(), _windows():
        length = sequence or min(positions or SHORT, LONGEST)
        if module.main_input_name == "pixel_values":
            length, positions = WITHOUT_TEXT, WITHOUT_TEXT
        head = module.get_output_embeddings()
        embedding = module.get_input_embeddings() if head is not None else None
        tied = head is not None and getattr(embedding, "weight", None) is head.weight
        return trace(module, _inputs_of(module, text), length, tied=tied, positions=positions)


@contextmanager
def _windows() -> Iterator[None]:
    """Let attention be as flash attention: it skips what a sliding window hides, and knows caps and sinks.

    transformers gives torch's attention a mask for a window, by which whole squares would be multiplied.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        window, causal = options.get("sliding_window"), options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        options.pop("softcap", None)
        if window is None or mask is None or not causal or query.shape[2] != key.shape[2]:
            return usual(module, query, key, value, mask, **options)
        with seeing(window):
            return usual(module, query, key, value, None, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop("sdpa")


def _inputs_of(module: Any, text: Any) -> Inputs:
    """The inputs of a model of transformers, with labels where its class takes some."""
    import inspect

    takes = inspect.signature(module.forward).parameters
    config, name = module.config, type(module).__name__

    def inputs(batch: int, sequence: int) -> dict[str, Any]:
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        given: dict[str, Any] = {}
        if "input_ids" in takes:
            given["input_ids"] = ids
        if module.main_input_name == "pixel_values" or ("pixel_values" in takes and "return_loss" in takes):
            vision = getattr(config, "vision_config", config)
            size = (
                vision.image_size if isinstance(vision.image_size, (list, tuple)) else [vision.image_size] * 2
            )
            given["pixel_values"] = torch.zeros(batch, vision.num_channels, *size, dtype=module.dtype)
        if "return_loss" in takes:
            given["return_loss"] = True
        if "labels" in takes:
            one_each = name.endswith(("ForSequenceClassification", "ForImageClassification"))
            given["labels"] = torch.zeros(batch, dtype=torch.long) if one_each else ids
        elif getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = ids
        return given

    if module.main_input_name not in ("input_ids", "pixel_values"):
        raise ValueError(
            f"{name} is given {module.main_input_name}: return it from a function, with one that makes its "
            "inputs, and name that as --module."
        )
    return inputs


def _tokens(batch: int, sequence: int) -> torch.Tensor:
    return torch.zeros(batch, sequence, dtype=torch.long)
