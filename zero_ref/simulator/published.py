"""Runs that others published, read from files.

They lie in `published_runs/`, one file for each source, with the models and the machines that only this
source has; `shared.json` has those of several sources. Only runs that can be simulated are there: no tensor,
pipeline or context parallelism. A run that is submitted is read from a file of the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from zero_ref.simulator._checks import check_name, nearest
from zero_ref.simulator._records import checked, read_json, record
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.configuration import from_config
from zero_ref.simulator.models import GPT2, TRANSFORMERS, Llama, Transformer
from zero_ref.simulator.runs import (
    Machines as Machines,
    Published as Published,
    Run as Run,
    Source as Source,
    operations_of_token as operations_of_token,
    use_of,
)
from zero_ref.simulator.scenario import Scenario

T = TypeVar("T")

FAMILIES: dict[str, type[GPT2] | type[Llama]] = {"GPT2": GPT2, "Llama": Llama}

PLACE = Path(__file__).with_name("published_runs")

SHARED = "shared"
"""The file with the rule, and the models and the machines of several sources."""

OPTIONS = {
    name: hint
    for name, hint in get_type_hints(Scenario).items()
    if name in {each.name for each in fields(Scenario)} - {each.name for each in fields(Run)}
    and name not in ("architecture", "world_size")
}
"""The fields of `Scenario` that a run may have beside those of `Run`, with their types."""


@dataclass(frozen=True)
class SourceFile:
    """What is in the file of a source.

    Args:
        source: as `Source`.
        models: those of no other source: the fields of a `GPT2` or a `Llama`, by its `family`, or a
            `config`, as a config.json of Hugging Face; and `published_params`, where it was published.
        clusters: likewise, as `Machines`.
        runs: as `Run`, with any of OPTIONS beside.
    """

    source: Source
    runs: list[Any]
    models: Mapping[str, Any] = field(default_factory=dict)
    clusters: Mapping[str, Machines] = field(default_factory=dict)


def with_source(data: Published, key: str, values: Any) -> Published:
    """Some runs, and beside them those of one more source, checked.

    >>> source = {"title": "A report", "url": "https://example.org", "read": "table 1"}
    >>> with_source(published(), "report", {"source": source, "runs": []}).sources["report"].title
    'A report'

    Args:
        key: of the source: the name of its file without the ending.
        values: what the file has, as `SourceFile`.
    Raises:
        ValueError: something is missing or unknown, of another type, or called as something else is.
    """
    _check_new("source", key, data.sources, key)
    file = record(SourceFile, values, key)
    sizes, params = _models(key, file.models)
    models = _joined(key, "model", data.models, sizes)
    clusters = _joined(key, "cluster", data.clusters, file.clusters)
    runs = list(data.runs)
    for place, each in enumerate(file.runs):
        run = _run(key, each, f"{key}.runs[{place}]")
        _check_new("run", run.id, {one.id for one in runs}, key)
        if run.model in TRANSFORMERS and run.model not in models:
            models[run.model] = TRANSFORMERS[run.model]
        if run.cluster in CLUSTERS and run.cluster not in clusters:
            clusters[run.cluster] = Machines(run.cluster, "the preset")
        check_name(f"model of run {run.id}:", run.model, {**models, **TRANSFORMERS})
        check_name(f"cluster of run {run.id}:", run.cluster, {**clusters, **CLUSTERS})
        runs.append(run)
    return replace(
        data,
        sources={**data.sources, key: file.source},
        models=models,
        params={**data.params, **params},
        clusters=clusters,
        runs=tuple(runs),
    )


def _check_new(what: str, name: str, known: Any, key: str) -> None:
    if name in known:
        raise ValueError(f"{key}: there is a {what} {name!r} already. Choose another name.")


def _joined(key: str, what: str, old: Mapping[str, T], new: Mapping[str, T]) -> dict[str, T]:
    for name in new:
        _check_new(what, name, old, key)
    return {**old, **new}


def _models(key: str, written: Mapping[str, Any]) -> tuple[dict[str, Transformer], dict[str, int]]:
    """The models of a file, and the numbers of their parameters that were published."""
    models, params = {}, {}
    for name, size in written.items():
        what = f"{key}.models.{name}"
        size = checked(Mapping[str, Any], size, what)
        if "published_params" in size:
            params[name] = checked(int, size.pop("published_params"), f"{what}.published_params")
        models[name] = _model(size, what)
    return models, params


def _model(size: dict[str, Any], what: str) -> Transformer:
    if "config" in size:
        try:
            return from_config(checked(Mapping[str, Any], size["config"], f"{what}.config"))
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    family = size.pop("family", None)
    if family not in FAMILIES:
        raise ValueError(f"{what} must have a config, or a family that is one of {', '.join(FAMILIES)}.")
    return record(FAMILIES[family], size, what)


def _run(key: str, written: Any, what: str) -> Run:
    """A run, whose options stand beside its other fields."""
    values = checked(Mapping[str, Any], written, what)
    options = {
        name: checked(OPTIONS[name], values.pop(name), f"{what}.{name}") for name in OPTIONS if name in values
    }
    known = {each.name for each in fields(Run)} - {"source", "options"}
    for name in values:
        if name not in known:
            meant = nearest(name, [*known, *OPTIONS])
            hint = f" (did you mean {meant!r}?)" if meant else ""
            raise ValueError(f"{what} has no {name!r}{hint}; it has {', '.join(sorted({*known, *OPTIONS}))}.")
    return record(Run, {"use": use_of(key), **values, "source": key, "options": options}, what)


@cache
def published() -> Published:
    """All runs in `published_runs/`."""
    shared = read_json(PLACE / f"{SHARED}.json")
    models, params = _models(SHARED, shared["models"])
    clusters = {name: record(Machines, each, name) for name, each in shared["clusters"].items()}
    data = Published(shared["rule"], {}, models, params, clusters, ())
    for path in sorted(PLACE.glob("*.json")):
        if path.stem != SHARED:
            data = with_source(data, path.stem, read_json(path))
    return data
