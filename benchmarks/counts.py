"""Published configurations: what transformers builds of each, beside the published numbers of parameters.

    python -m benchmarks.counts                          # those that the tests keep
    python -m benchmarks.counts FILE.json FOLDER ...     # others

A published number is that of the elements in a checkpoint, which may be more than a model's parameters. What
else it counts is named in `published.csv` and computed from the model here; what is left is the difference.
The numbers are those that Hugging Face's Hub has for a checkpoint, under the address in the file's column
`source`; where KerasHub states the same number, the address is that of its file.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from zero_ref.lab.built import built
from zero_ref.simulator.configuration import quantized
from zero_ref.simulator.layers import is_of_experts
from zero_ref.simulator.models import from_module

KEPT = Path(__file__).parent.parent / "tests" / "simulator" / "configurations"
"""The configurations that the tests keep, as published, and the published numbers of parameters."""

BLOCK_OF_FP8 = 128
"""Rows and columns that have one scale, in the checkpoints of DeepSeek."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A model as transformers builds it.

    Args:
        shapes: of all parameters, by name.
        vocabulary, width: of the embedding.
        chosen: experts that a token goes to.
    """

    shapes: dict[str, Shape]
    vocabulary: int
    width: int
    chosen: int

    @property
    def numel(self) -> int:
        """All parameters."""
        return sum(map(_numel, self.shapes.values()))

    @property
    def active(self) -> int:
        """Parameters that a token goes through: of experts, those it is sent to."""
        return sum(
            _numel(shape) // shape[0] * min(self.chosen, shape[0]) if is_of_experts(name) else _numel(shape)
            for name, shape in self.shapes.items()
        )

    def blocks(self) -> list[dict[str, Shape]]:
        """The parameters of each block of the language model, by the last part of their names."""
        found: dict[int, dict[str, Shape]] = {}
        for name, shape in self.shapes.items():
            if inside := re.fullmatch(r"model(?:\.language_model)?\.layers\.(\d+)\.(.+)", name):
                found.setdefault(int(inside[1]), {})[inside[2]] = shape
        return [found[number] for number in sorted(found)]

    @property
    def blocks_and_ahead(self) -> list[dict[str, Shape]]:
        """The same, with that of a module of multi-token prediction, which is as the last one."""
        return [*self.blocks(), *self.blocks()[-1:]]


def _numel(shape: Shape) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def output_head(model: Model) -> int:
    """A tied output head, which some checkpoints store beside the embedding."""
    return model.vocabulary * model.width


def module_ahead(model: Model) -> int:
    """A module of multi-token prediction: a block, a product of two hidden states, three norms."""
    block = sum(map(_numel, model.blocks()[-1].values()))
    return block + 2 * model.width**2 + 3 * model.width


def embedding_and_head(model: Model) -> int:
    """Both again, as checkpoints of DeepSeek store them with a module of multi-token prediction."""
    return 2 * model.vocabulary * model.width


def fp8_scales(model: Model) -> int:
    """A scale of each block of a matrix, in all blocks of the model and the one that predicts ahead."""
    return sum(_scales(*param) for block in model.blocks_and_ahead for param in block.items())


def corrections(model: Model) -> int:
    """A bias of each expert's score, which balances them and is not trained by gradients."""
    return sum(block["mlp.gate.weight"][0] for block in model.blocks_and_ahead if "mlp.gate.weight" in block)


def _scales(name: str, shape: Shape) -> int:
    """Return the number of scales of a linear layer, or of all experts' layers; the router has none."""
    if name == "mlp.gate.weight" or len(shape) < 2:
        return 0
    *experts, rows, columns = shape
    parts = 2 if name.endswith(".gate_up_proj") else 1  # gate and up are stored apart
    blocks = -(-rows // parts // BLOCK_OF_FP8) * -(-columns // BLOCK_OF_FP8)
    return (experts[0] if experts else 1) * parts * blocks


DIFFERENCES: dict[str, Callable[[Model], int]] = {
    "tied output head stored too": output_head,
    "a module of multi-token prediction": module_ahead,
    "embedding and output head stored twice": embedding_and_head,
    "scales of FP8": fp8_scales,
    "corrections of experts' scores": corrections,
}
"""Elements that a published number counts beside the model's parameters."""


@dataclass(frozen=True)
class Row:
    """A configuration: counted, or refused for a reason.

    Args:
        counted: parameters.
        active: those that a token goes through.
        stored: the format of quantized weights, which are counted as if of 16 bits.
        published: the number of parameters; None where none was found.
        source: the address where it is published.
        named: what that number counts beside the parameters.
    """

    file: str
    refused: str = ""
    counted: int = 0
    active: int = 0
    stored: str = ""
    published: int | None = None
    source: str = ""
    named: dict[str, int] = field(default_factory=dict)

    @property
    def difference(self) -> int | None:
        """Return the part of the published number that nothing explains."""
        if self.published is None or self.refused:
            return None
        return self.published - self.counted - sum(self.named.values())


def rows(paths: Iterable[Path] = (KEPT,)) -> list[Row]:
    """A row for each file, and for each configuration in a folder."""
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    with (KEPT / "published.csv").open(newline="") as opened:
        published = {line["file"]: line for line in csv.DictReader(opened)}
    return [_row(file, published.get(file.name, {})) for file in files]


def model_of(file: Path) -> Model:
    """The model of a configuration.

    Raises:
        ValueError: transformers cannot build it.
    """
    config = json.loads(file.read_text())
    made = built(config)
    text = made.config.get_text_config()  # type: ignore[operator, union-attr]
    chosen = next((n for key in CHOSEN if (n := getattr(text, key, None))), 0)
    shapes = {param.name: param.shape for param in from_module(made)}
    return Model(shapes, text.vocab_size, text.hidden_size, chosen)


CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""The keys under which configurations have the number of experts that a token goes to."""


def _row(file: Path, published: dict[str, str]) -> Row:
    try:
        model = model_of(file)
    except ValueError as error:
        return Row(file.name, refused=str(error))
    names = [name for name in published.get("counts_also", "").split("; ") if name]
    return Row(
        file.name,
        counted=model.numel,
        active=model.active,
        stored=quantized(json.loads(file.read_text())),
        published=int(published["parameters"]) if published.get("parameters") else None,
        source=published.get("source", ""),
        named={name: DIFFERENCES[name](model) for name in names},
    )


def lines(found: Iterable[Row]) -> Iterable[str]:
    """The table as text."""
    for row in found:
        yield row.file
        if row.refused:
            yield f"    refused: {row.refused}"
            continue
        used = f", {row.active:,} for a token" if row.active < row.counted else ""
        yield f"    counted    {row.counted:>19,}{used}"
        if row.stored:
            yield f"    stored in few bits: {row.stored}"
        if row.published is None:
            yield "    published   no number found"
            continue
        yield f"    published  {row.published:>19,}  {row.source}"
        for name, numel in row.named.items():
            yield f"        {numel:>22,}  {name}"
        yield f"    difference {row.difference:>19,}"


def main() -> None:
    """Print the table, and how many files were read."""
    found = rows(list(map(Path, sys.argv[1:])) or (KEPT,))
    print(*lines(found), sep="\n")
    read = [row for row in found if not row.refused]
    compared = [row.difference for row in read if row.difference is not None]
    print(
        f"\n{len(read)} of {len(found)} read, {len(compared)} of them with a published number, "
        f"{compared.count(0)} without a difference"
    )


if __name__ == "__main__":
    main()
