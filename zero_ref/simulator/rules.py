"""Rules of families, which read the kind of each block of a model from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_ref.simulator.decoders import Block


@dataclass(frozen=True)
class Config:
    """A configuration, of which every value that is used is checked."""

    entries: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """A value; a point in a key goes into an entry. None where there is none."""
        value: Any = self.entries
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def size(self, keys: str, least: int = 1) -> int:
        """A size: keys or products of keys, of which the first counts that are all there.

        >>> Config({"experts": 8, "width": 3}).size("n_experts|experts*width")
        24

        Raises:
            ValueError: none is there, or one is no integer of at least `least`.
        """
        choices = [one.split("*") for one in keys.split("|")]
        found = next((one for one in choices if all(self.get(key) is not None for key in one)), None)
        if found is None:
            wanted = " or ".join(" and ".join(one) for one in choices)
            raise ValueError(
                f"a configuration of model_type {self.entries.get('model_type')!r} needs {wanted}, an "
                f"integer of at least {least}; missing."
            )
        product = 1
        for key in found:
            value = self.get(key)
            if isinstance(value, list) and value and value.count(value[0]) == len(value):
                value = value[0]  # one for each block, all alike
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                raise ValueError(
                    f"{key} is {value!r}, and must be an integer of at least {least} and below 2^31."
                )
            product *= value
        return product

    def count(self, key: str) -> int:
        """A size, or with `[]` behind the key the number of entries in a list."""
        if not key.endswith("[]"):
            return self.size(key)
        listed = self.get(key[:-2])
        return len(listed) if isinstance(listed, list) else 0

    def or_else(self, key: str, usual: int) -> int:
        """A size that may be 0, or what is usual where it is absent."""
        return usual if self.get(key) is None else self.size(key, least=0)

    def flag(self, key: str, usual: bool) -> bool:
        """An option that is true or false; what is usual where it is absent or null."""
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise ValueError(f"{key} is {value!r}, and must be true or false.")
        return usual if value is None else value

    def per_block(self, key: str, depth: int, known: Sequence[Any]) -> list[Any] | None:
        """A list with an entry for each block; None where there is none.

        Raises:
            ValueError: it has another length, or an entry that is not known.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | str) or len(value) < depth:
            raise ValueError(f"{key} must have an entry for each of the {depth} blocks, got {value!r:.80}.")
        strange = [one for one in value[:depth] if one not in known]
        if strange:
            raise ValueError(
                f"{key} has {strange[0]!r}, which is not known here; known are {', '.join(map(repr, known))}."
            )
        return list(value[:depth])

    def factor(self, key: str) -> float:
        """A number above 0, and not so large that a size becomes absurd."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
            raise ValueError(f"{key} is {value!r}, and must be a number above 0.")
        return value

    def numbers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
            raise ValueError(f"{key} must be a list of whole numbers, got {value!r:.80}.")
        return value

    def refuse_other(self, accepted: Mapping[str, Any], *, needed: bool = False) -> None:
        """Refuse what would change the parameters in a way that no table knows.

        Args:
            needed: the value has to be there.
        """
        other = [key for key in accepted if self.get(key) not in (None, accepted[key])]
        other += [key for key in accepted if needed and self.get(key) is None]
        if other:
            said = ", ".join(f"{key} {self.get(key)!r}" for key in other)
            raise ValueError(
                f"{said} change{'s' * (len(other) == 1)} the parameters in a way that is not counted here; "
                f"accepted: {', '.join(repr(accepted[key]) for key in other)}. Take the parameters from the "
                "module itself: from_module."
            )

    def modules_ahead(self) -> int:
        """Modules of multi-token prediction."""
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
        return next((self.or_else(key, 0) for key in keys if self.get(key) is not None), 0)


# ------------------------------------------------------------------------------------- windows of attention


def windows_of(config: Config, rule: str, depth: int) -> list[int]:
    """The tokens that attention of each block sees, at most; 0 for the whole sequence.

    >>> windows_of(Config({"sliding_window": 128}), "but every 2nd", 4)
    [128, 0, 128, 0]

    Args:
        rule: which blocks see a window where `layer_types` does not say: "" for none, "all", "late" for those
            from `max_window_layers` on if `use_sliding_window`, "chunks" for those of `llama4_text`, and "but
            every 4th" for all but each fourth one.
    """
    width = config.or_else("attention_chunk_size" if rule == "chunks" else "sliding_window", 0)
    if not rule or not width:
        return [0] * depth
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) >= depth:
        return [width * (one in ("sliding_attention", "chunked_attention")) for one in types[:depth]]
    if rule == "all":
        return [width] * depth
    if rule == "late":
        first = config.or_else("max_window_layers", 28)
        used = config.flag("use_sliding_window", usual=False)
        return [width * (used and number >= first) for number in range(depth)]
    if rule == "chunks":
        return [width * (number % 4 != 3) for number in range(1, depth + 1)]
    usual = int(rule.split()[-1][:-2])
    keys = ("sliding_window_pattern", "global_attn_every_n_layers")
    said = next((config.or_else(key, usual) for key in keys if config.get(key) is not None), usual)
    every = said if usual > 2 else usual
    return [width * bool(every and number % every) for number in range(1, depth + 1)]


# --------------------------------------------------------------------------------------- kinds of blocks

Sizes = Mapping[str, int]
Rule = Callable[[Config, Sizes], list[Block]]

RULES: dict[str, Rule] = {"": lambda config, sizes: []}
"""By name. A rule gives a block for each layer; none where all are of a family's only kind."""


def _rule(name: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES[name] = rule
        return rule

    return add


def _first_dense(config: Config, depth: int, key: str = "first_k_dense_replace") -> list[str]:
    """Dense blocks first, then one with experts every `moe_layer_freq`; or what a list says."""
    listed = config.per_block("mlp_layer_types", depth, ("dense", "sparse"))
    if listed is not None:
        return listed
    first, every = config.size(key, least=0), config.or_else("moe_layer_freq", 1) or 1
    return ["dense" if number < first or number % every else "sparse" for number in range(depth)]


def _every_so_many(config: Config, depth: int) -> list[str]:
    """Experts in every `decoder_sparse_step`-th block, but for those in `mlp_only_layers`."""
    every, dense = config.or_else("decoder_sparse_step", 1), config.numbers("mlp_only_layers") or []
    return [
        "sparse" if number not in dense and every and (number + 1) % every == 0 else "dense"
        for number in range(depth)
    ]


@_rule("all sparse")
def _all_sparse(config: Config, sizes: Sizes) -> list[Block]:
    return [Block(mlp="sparse")] * sizes["depth"]


@_rule("first dense")
def _first_blocks_dense(config: Config, sizes: Sizes) -> list[Block]:
    return [Block(mlp=mlp) for mlp in _first_dense(config, sizes["depth"])]


@_rule("afmoe")
def _afmoe(config: Config, sizes: Sizes) -> list[Block]:
    return [Block(mlp=mlp) for mlp in _first_dense(config, sizes["depth"], "num_dense_layers")]


@_rule("every so many")
def _sparse_every_so_many(config: Config, sizes: Sizes) -> list[Block]:
    return [Block(mlp=mlp) for mlp in _every_so_many(config, sizes["depth"])]


@_rule("glm")
def _glm(config: Config, sizes: Sizes) -> list[Block]:
    mixer = "normed" if config.flag("use_qk_norm", usual=False) else ""
    return [Block(mixer, mlp) for mlp in _first_dense(config, sizes["depth"])]


@_rule("latent")
def _latent(config: Config, sizes: Sizes) -> list[Block]:
    mixer = "latent" if config.get("q_lora_rank") is not None else "latent, whole query"
    return [Block(mixer, mlp) for mlp in _first_dense(config, sizes["depth"])]


@_rule("latent, every indexer")
def _latent_every_indexer(config: Config, sizes: Sizes) -> list[Block]:
    # Other schedules share an indexer among blocks, and their blocks have fewer parameters.
    config.refuse_other({"index_topk_freq": 1, "index_topk_pattern": "F" * sizes["depth"]})
    config.per_block("indexer_types", sizes["depth"], ("full",))
    return _latent(config, sizes)


def _delta_mixers(config: Config, depth: int) -> list[str]:
    """As `layer_types` says; else full attention in every fourth block, or `full_attention_interval`-th."""
    known = ("full_attention", "linear_attention")
    listed = config.per_block("layer_types", depth, known)
    every = config.or_else("full_attention_interval", 4) or 1
    return listed or [known[bool((number + 1) % every)] for number in range(depth)]


@_rule("delta")
def _delta(config: Config, sizes: Sizes) -> list[Block]:
    depth = sizes["depth"]
    return list(map(Block, _delta_mixers(config, depth), _every_so_many(config, depth)))


@_rule("delta, dense")
def _delta_dense(config: Config, sizes: Sizes) -> list[Block]:
    return [Block(mixer, "dense") for mixer in _delta_mixers(config, sizes["depth"])]


@_rule("delta, sparse")
def _delta_sparse(config: Config, sizes: Sizes) -> list[Block]:
    return [Block(mixer, "sparse") for mixer in _delta_mixers(config, sizes["depth"])]


@_rule("kimi")
def _kimi(config: Config, sizes: Sizes) -> list[Block]:
    depth = sizes["depth"]
    full = "full" if config.get("q_lora_rank") is not None else "full, whole query"
    names = {"full_attention": full, "linear_attention": "delta"}
    listed = config.per_block("layer_types", depth, tuple(names))
    if listed is None:  # counted from 1
        inside = config.numbers("linear_attn_config.full_attn_layers")
        if inside is None:
            raise ValueError(
                "a configuration of model_type 'kimi_linear' needs layer_types, or full_attn_layers in "
                "linear_attn_config; missing."
            )
        listed = [
            "full_attention" if number in inside else "linear_attention" for number in range(1, depth + 1)
        ]
    return [Block(names[mixer], mlp) for mixer, mlp in zip(listed, _first_dense(config, depth))]


@_rule("ernie")
def _ernie(config: Config, sizes: Sizes) -> list[Block]:
    depth, every = sizes["depth"], config.or_else("moe_layer_interval", 1) or 1
    first, last = config.or_else("moe_layer_start_index", 1), depth - 1
    if config.get("moe_layer_end_index") != -1:
        last = config.or_else("moe_layer_end_index", last)
    return [
        Block(mlp="sparse" if (number + 1) % every == 0 and first <= number <= last else "dense")
        for number in range(depth)
    ]


@_rule("llama4")
def _llama4(config: Config, sizes: Sizes) -> list[Block]:
    depth, every = sizes["depth"], config.or_else("interleave_moe_layer_step", 1)
    sparse = config.numbers("moe_layers")
    if sparse is None:
        sparse = list(range(every - 1, depth, every)) if every else []
    # A shared expert is as wide as the others, and a dense MLP has a width of its own.
    wide, narrow = ("s", config.size("intermediate_size_mlp")), ("s", sizes["hidden"])
    return [
        Block(mlp="sparse", sizes=(narrow,)) if number in sparse else Block(mlp="dense", sizes=(wide,))
        for number in range(depth)
    ]


@_rule("granite")
def _granite(config: Config, sizes: Sizes) -> list[Block]:
    depth = sizes["depth"]
    names = {"attention": "attention", "full_attention": "attention"}
    names |= {"mamba": "mamba", "linear_attention": "mamba"}
    listed = config.per_block("layer_types", depth, tuple(names)) or ["mamba"] * depth
    mlp = "sparse" if config.or_else("num_local_experts", 8) else "dense"
    return [Block(names[mixer], mlp) for mixer in listed]


@_rule("deepseek_v4")
def _deepseek_v4(config: Config, sizes: Sizes) -> list[Block]:
    depth = sizes["depth"]
    of_ratio = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
    names = [f"{name}_attention" for name in of_ratio.values()]
    listed = config.per_block("layer_types", depth, names)
    if listed is None:
        ratios = config.per_block("compress_ratios", depth, tuple(of_ratio))
        if ratios is None:
            raise ValueError(
                "a configuration of model_type 'deepseek_v4' needs layer_types or compress_ratios; missing."
            )
        listed = [f"{of_ratio[ratio]}_attention" for ratio in ratios]
    inputs = sizes["heads"] * config.size("head_dim") // config.size("o_groups")
    window = config.or_else("sliding_window", 0)
    own = (("o_inputs", inputs), ("rope", config.size("qk_rope_head_dim")))
    return [
        Block(mixer, "sparse", (*own, ("window", window)) if mixer == names[0] else own) for mixer in listed
    ]


@_rule("nemotron_h")
def _nemotron_h(config: Config, sizes: Sizes) -> list[Block]:
    depth = sizes["depth"]
    pattern = config.per_block("hybrid_override_pattern", depth, tuple("M*-E"))
    if pattern is None:
        names = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        names |= {"mamba": "M", "attention": "*"}
        key = "layers_block_type" if config.get("layers_block_type") is not None else "layer_types"
        listed = config.per_block(key, depth, tuple(names))
        if listed is None:
            raise ValueError(
                "a configuration of model_type 'nemotron_h' needs hybrid_override_pattern or layer_types; "
                "missing."
            )
        pattern = [names[one] for one in listed]
    experts = "E, latent" if config.get("moe_latent_size") else "E"
    return [Block(mixer=one) if one in "M*" else Block(mlp=experts if one == "E" else one) for one in pattern]


@_rule("nemotron-nas")
def _nemotron_nas(config: Config, sizes: Sizes) -> list[Block]:
    listed, depth = config.get("block_configs"), sizes["depth"]
    if not isinstance(listed, list) or len(listed) != depth:
        raise ValueError(f"block_configs must have an entry for each of the {depth} blocks.")
    return [_searched(Config(one if isinstance(one, Mapping) else {}), sizes) for one in listed]


def _searched(config: Config, sizes: Sizes) -> Block:
    """A block that was found by a search: without attention or MLP, or with another width than others.

    Source: modeling_decilm.py beside the weights of nvidia/Llama-3_3-Nemotron-Super-49B-v1.
    """
    config.refuse_other({"attention.replace_with_linear": False, "ffn.replace_with_linear": False})
    mixer = "no attention" if config.flag("attention.no_op", usual=False) else ""
    mlp = "no MLP" if config.flag("ffn.no_op", usual=False) else ""
    own: list[tuple[str, int]] = []
    if not mixer:
        own.append(("g", sizes["heads"] // config.size("attention.n_heads_in_group")))
    if not mlp:
        width = int(2 * config.factor("ffn.ffn_mult") * sizes["width"] / 3)
        own.append(("h", -(-width // 256) * 256))
    return Block(mixer, mlp, tuple(own))


@_rule("lfm2")
def _lfm2(config: Config, sizes: Sizes) -> list[Block]:
    depth = sizes["depth"]
    listed = config.per_block("layer_types", depth, ("full_attention", "conv"))
    if listed is None:
        full = config.numbers("full_attn_idxs")
        listed = ["full_attention" if full is None or number in full else "conv" for number in range(depth)]
    if config.get("num_experts") is not None:
        dense = config.size("num_dense_layers", least=0)
        return [Block(mixer, "dense" if number < dense else "sparse") for number, mixer in enumerate(listed)]
    width = config.or_else("block_ff_dim", sizes["hidden"])
    if config.flag("block_auto_adjust_ff_dim", usual=True):
        times = (
            1.0
            if config.get("block_ffn_dim_multiplier") is None
            else config.factor("block_ffn_dim_multiplier")
        )
        width = int(times * int(2 * width / 3))
        multiple = config.or_else("block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    return [Block(mixer, "dense", (("h", width),)) for mixer in listed]


@_rule("gemma4")
def _gemma4(config: Config, sizes: Sizes) -> list[Block]:
    depth, shared = sizes["depth"], config.or_else("num_kv_shared_layers", 0)
    types = config.per_block("layer_types", depth, ("sliding_attention", "full_attention"))
    types = types or [("full", "sliding")[number % 6 > 0] + "_attention" for number in range(1, depth + 1)]
    same = config.flag("attention_k_eq_v", usual=False)
    wide = 1 + config.flag("use_double_wide_mlp", usual=False)
    of_full: tuple[tuple[str, int], ...] = (("e", config.size("global_head_dim")),)
    if same and config.get("num_global_key_value_heads") is not None:
        of_full += (("g", config.size("num_global_key_value_heads")),)
    mlp = "sparse" if config.flag("enable_moe_block", usual=False) else "dense"
    if config.or_else("hidden_size_per_layer_input", 0):
        config.refuse_other({"enable_moe_block": False})
        mlp = "dense, per layer"
    found = []
    for number, one in enumerate(types):
        full, reused = one == "full_attention", number >= depth - shared
        mixer = "of another block" if reused else "keys are values" if full and same else "own"
        own = of_full if full else ()
        found.append(Block(mixer, mlp, (*own, ("h", wide * sizes["hidden"])) if reused and wide > 1 else own))
    return found


@_rule("mimo")
def _mimo(config: Config, sizes: Sizes) -> list[Block]:
    depth, window = sizes["depth"], config.or_else("sliding_window", 0)
    pattern = config.per_block("hybrid_layer_pattern", depth, (0, 1))
    experts = config.per_block("moe_layer_freq", depth, (0, 1))
    if pattern is None or experts is None:
        raise ValueError(
            "a configuration of model_type 'mimo_v2_flash' needs hybrid_layer_pattern and moe_layer_freq, "
            "lists with an entry for each block; missing."
        )
    config.refuse_other(
        {
            "swa_num_attention_heads": sizes["heads"],
            "swa_head_dim": config.get("head_dim"),
            "swa_v_head_dim": config.get("v_head_dim"),
            "n_shared_experts": 0,
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
        }
    )
    sliding = (("g", config.size("swa_num_key_value_heads")), ("window", window))
    return [
        Block(*(("sliding", mlp, sliding) if one else ("full", mlp)))
        for one, mlp in zip(pattern, ("sparse" if sparse else "dense" for sparse in experts))
    ]
