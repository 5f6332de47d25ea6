"""Published configurations: what the simulator counts, beside the published numbers of parameters.

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
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from zero_ref.simulator.architectures import GPT2, Llama
from zero_ref.simulator.configuration import described, quantized
from zero_ref.simulator.decoders import Decoder
from zero_ref.simulator.layers import ParamShape

KEPT = Path(__file__).parent.parent / "tests" / "simulator" / "configurations"
"""The configurations that the tests keep, as published, and the published numbers of parameters."""

Model = GPT2 | Llama | Decoder

BLOCK_OF_FP8 = 128
"""Rows and columns that have one scale, in the checkpoints of DeepSeek."""


def output_head(model: Model) -> int:
    """A tied output head, which some checkpoints store beside the embedding."""
    return model.vocabulary * model.width


def module_ahead(model: Model) -> int:
    """A module of multi-token prediction."""
    return (model.ahead() or 0) if isinstance(model, Decoder) else 0


def embedding_and_head(model: Model) -> int:
    """Both again, as checkpoints of DeepSeek store them with a module of multi-token prediction."""
    return 2 * model.vocabulary * model.width


def fp8_scales(model: Model) -> int:
    """A scale of each block of a matrix, in all blocks of the model and the one that predicts ahead."""
    return sum(_scales(param) for block in _blocks(model) for param in block)


def corrections(model: Model) -> int:
    """A bias of each expert's score, which balances them and is not trained by gradients."""
    routers = (param for block in _blocks(model) for param in block if param.name == "mlp.gate.weight")
    return sum(param.shape[0] for param in routers)


def _blocks(model: Model) -> list[tuple[ParamShape, ...]]:
    if not isinstance(model, Decoder):
        return []
    ahead = model.blocks[-1:] * model.predicting_ahead
    return [model.tensors_of_block(block) for block in (*model.blocks, *ahead)]


def _scales(param: ParamShape) -> int:
    """Return the number of scales of a linear layer, or of all experts' layers; the router has none."""
    if param.name == "mlp.gate.weight" or len(param.shape) < 2:
        return 0
    *experts, rows, columns = param.shape
    parts = 2 if param.name.endswith(".gate_up_proj") else 1  # gate and up are stored apart
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
    """A configuration: read, or refused for a reason.

    Args:
        parts: of what was read, by name; None for a number that is not known.
        active: parameters that a token goes through.
        stored: the format of quantized weights, which are counted and cannot be trained.
        published: the number of parameters; None where none was found.
        source: the address where it is published.
        named: what that number counts beside the parts.
    """

    file: str
    refused: str = ""
    parts: dict[str, int | None] | None = None
    active: int = 0
    stored: str = ""
    published: int | None = None
    source: str = ""
    named: dict[str, int] | None = None

    @property
    def counted(self) -> int:
        """The parameters in all parts whose number is known."""
        return sum(numel or 0 for numel in (self.parts or {}).values())

    @property
    def has_experts(self) -> bool:
        """Whether a token goes through fewer parameters than the language model has."""
        return self.active < ((self.parts or {}).get("language model") or 0)

    @property
    def difference(self) -> int | None:
        """Return the part of the published number that nothing explains."""
        if self.published is None or self.parts is None:
            return None
        return self.published - self.counted - sum((self.named or {}).values())


def rows(paths: Iterable[Path] = (KEPT,)) -> list[Row]:
    """A row for each file, and for each configuration in a folder."""
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    with (KEPT / "published.csv").open(newline="") as opened:
        published = {line["file"]: line for line in csv.DictReader(opened)}
    return [_row(file, published.get(file.name, {})) for file in files]


def _row(file: Path, published: dict[str, str]) -> Row:
    config = json.loads(file.read_text())
    try:
        model = described(config)
    except ValueError as error:
        return Row(file.name, refused=str(error))
    whole = sum(param.numel for param in model.shapes())
    names = [name for name in published.get("counts_also", "").split("; ") if name]
    return Row(
        file.name,
        parts=model.parts() if isinstance(model, Decoder) else {"language model": whole},
        active=model.active if isinstance(model, Decoder) else whole,
        stored=quantized(config),
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
        used = f", {row.active:,} for a token" if row.has_experts else ""
        yield f"    counted    {row.counted:>19,}{used}"
        if len(row.parts or {}) > 1:
            for name, numel in (row.parts or {}).items():
                yield f"        {'not known' if numel is None else f'{numel:,}':>22}  {name}"
        if row.stored:
            yield f"    training is refused: {row.stored}"
        if row.published is None:
            yield "    published   no number found"
            continue
        yield f"    published  {row.published:>19,}  {row.source}"
        for name, numel in (row.named or {}).items():
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
