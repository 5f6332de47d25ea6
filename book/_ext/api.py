"""Sphinx extension: the reference in book/api/, made from docstrings.

The pages name what they show (`.. autofunction:: zero_ref.even`); sphinx.ext.autodoc reads the docstrings.
Ours are Markdown in small: `x` is code, and sections begin with a word and a colon ("Args: as `even`, and").
Here they become what autodoc takes, reStructuredText, with a link wherever code names something of the
reference, and with a link to the chapter that teaches it.

`CHAPTER_OF` is the table of the chapters that teach each name. tests/book/test_api_pages.py checks that
the table, the pages and the package agree.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

from zero_ref.simulator.options import options_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "book" / "api"

CHAPTER_OF = {
    "zero_ref.ParamSpec": 3,
    "zero_ref.Slice": 3,
    "zero_ref.Partition": 3,
    "zero_ref.sorted_greedy": 3,
    "zero_ref.registration_greedy": 3,
    "zero_ref.even": 3,
    "zero_ref.balanced": 13,
    "zero_ref.newton_schulz_operations": 13,
    "zero_ref.ZeroRedundancyOptimizer": 4,
    "zero_ref.ZeroRedundancyOptimizer.add_param_group": 14,
    "zero_ref.shard.local_state": 10,
    "zero_ref.ZeroRedundancyOptimizer.consolidate_state_dict": 10,
    "zero_ref.ZeroRedundancyOptimizer.load_state_dict": 10,
    "zero_ref.ZeroRedundancyOptimizer.join_hook": 19,
    "zero_ref.OSS": 3,
    "zero_ref.clip_grad_norm_": 11,
    "zero_ref.get_total_norm": 11,
    "zero_ref.reduce_to_owners": 6,
    "zero_ref.ShardedDataParallel": 7,
    "zero_ref.equal_shares": 7,
    "zero_ref.hook_with_zero_step": 6,
    "zero_ref.hook_with_zero_step_interleaved": 6,
    "zero_ref.save_sharded": 10,
    "zero_ref.save_sharded_async": 10,
    "zero_ref.PendingSave": 10,
    "zero_ref.load_sharded": 10,
    "zero_ref.StatefulOptimizer": 10,
    "zero_ref.OptimizerToLoad": 10,
    "zero_ref.consolidation_hook": 10,
    "zero_ref.consolidation_callback": 10,
    "zero_ref.AveragingSchedule": 17,
    "zero_ref.doctor": None,
    "zero_ref.doctor.adapters": None,
    "zero_ref.doctor.compare": None,
    "zero_ref.doctor.interface": None,
    "zero_ref.doctor.nccl_on_gloo": None,
    "zero_ref.doctor.watch": None,
    "zero_ref.ModelAverager": 17,
    "zero_ref.PeriodicModelAverager": 17,
    "zero_ref.HierarchicalModelAverager": 17,
    "zero_ref.PostLocalSGDState": 17,
    "zero_ref.post_localSGD_hook": 17,
    "zero_ref.PostLocalSGDOptimizer": 17,
    "zero_ref.DistributedOptimizer": 18,
    "zero_ref.plan.partition": 3,
    "zero_ref.plan.choice": 3,
    "zero_ref.plan.rules": 3,
    "zero_ref.dropin.oss": 3,
    "zero_ref.comm.agreement": 2,
    "zero_ref.comm.collectives": 2,
    "zero_ref.comm.process_group": 2,
    "zero_ref.comm.pairwise": 2,
    "zero_ref.local_sgd.averaging": 17,
    "zero_ref.local_sgd.optimizer": 17,
    "zero_ref.plan.layout": 5,
    "zero_ref.plan.gradients": 7,
    "zero_ref.plan.moves": 10,
    "zero_ref.plan.boxes": 10,
    "zero_ref.plan.parcels": 10,
    "zero_ref.plan.calls": 4,
    "zero_ref.simulator.ledger": 1,
    "zero_ref.simulator.ledger.state_bytes_of_rank": 3,
    "zero_ref.simulator.layers": 16,
    "zero_ref.simulator.layers.ParamShape": 3,
    "zero_ref.simulator.architectures": 16,
    "zero_ref.simulator.models": 3,
    "zero_ref.simulator.models.from_module": 1,
    "zero_ref.simulator.models.matrices_whole": 13,
    "zero_ref.simulator.models.ready_order": 8,
    "zero_ref.simulator.models.Architecture": 16,
    "zero_ref.simulator.models.Transformer": 16,
    "zero_ref.simulator.models.GPT2": 16,
    "zero_ref.simulator.models.Llama": 16,
    "zero_ref.simulator.models.from_config": 16,
    "zero_ref.simulator.configuration": 16,
    "zero_ref.simulator.traced": 16,
    "zero_ref.lab.built": 16,
    "zero_ref.lab.tracing": 16,
    "zero_ref.simulator.models.blocks": 8,
    "zero_ref.simulator.activations": 16,
    "zero_ref.simulator.memory": 8,
    "zero_ref.simulator.peak": 8,
    "zero_ref.simulator.norms": 16,
    "zero_ref.simulator.operations": 8,
    "zero_ref.simulator.operations.order": 6,
    "zero_ref.simulator.data_parallel": 8,
    "zero_ref.simulator.sharded": 7,
    "zero_ref.simulator.stage_3": 8,
    "zero_ref.simulator.local_sgd": 17,
    "zero_ref.simulator.groups": 16,
    "zero_ref.simulator.recipe": 4,
    "zero_ref.simulator.schedule": 4,
    "zero_ref.simulator.schedule.calls_of_rank": 6,
    "zero_ref.simulator.schedule.ddp_buckets": 5,
    "zero_ref.simulator.messages": 5,
    "zero_ref.simulator.strategy": 8,
    "zero_ref.simulator.traffic": 2,
    "zero_ref.simulator.cluster": 2,
    "zero_ref.simulator.cluster.Cluster": 16,
    "zero_ref.simulator.device.Device": 16,
    "zero_ref.simulator.timeline": 6,
    "zero_ref.simulator.price": 8,
    "zero_ref.simulator.held": 8,
    "zero_ref.simulator.play": 8,
    "zero_ref.simulator.trace": 6,
    "zero_ref.simulator.scenario": 17,
    "zero_ref.simulator.training": 17,
    "zero_ref.simulator.updates": 16,
    "zero_ref.simulator.offload": 16,
    "zero_ref.simulator.autocast": 16,
    "zero_ref.simulator.lora": 16,
    "zero_ref.simulator.rank_work": 17,
    "zero_ref.simulator.stages": 9,
    "zero_ref.simulator.tree": 9,
    "zero_ref.simulator.which": 9,
    "zero_ref.simulator.bill": 9,
    "zero_ref.simulator.search": 16,
    "zero_ref.lab.commands": 16,
    "zero_ref.simulator.sensitivity": 16,
    "zero_ref.simulator.saved": 10,
    "zero_ref.simulator.checkpoints": 10,
    "zero_ref.simulator.costs": 16,
    "zero_ref.simulator.kernels": 16,
    "zero_ref.simulator.spread": 16,
    "zero_ref.lab.ranks": 1,
    "zero_ref.lab.placement": 1,
    "zero_ref.lab.patience": 1,
    "zero_ref.lab.virtual": 4,
    "zero_ref.lab.meter": 4,
    "zero_ref.lab.meter.HeldBytes": 1,
    "zero_ref.lab.meter.held_bytes": 1,
    "zero_ref.lab.meter.state_bytes": 3,
    "zero_ref.lab.meter.sent_bytes": 17,
    "zero_ref.lab.meter.bytes_sent_by": 2,
    "zero_ref.lab.meter.wire_bytes": 17,
    "zero_ref.lab.meter.recording_distributed": 17,
    "zero_ref.lab.meter.recording_all_reduce": 6,
    "zero_ref.lab.meter.timing": 5,
    "zero_ref.lab.simulated_checkpoints": 10,
    "zero_ref.lab.tensor_peak": 1,
    "zero_ref.lab.recorder": 6,
    "zero_ref.lab.source": 4,
    "zero_ref.lab.drift": 17,
    "zero_ref.lab.model": 1,
    "zero_ref.lab.config": 0,
    "zero_ref.lab.config.GPTConfig": 1,
    "zero_ref.lab.train": 0,
    "zero_ref.lab.outcome": 0,
    "zero_ref.lab.dry_run": 0,
    "zero_ref.lab.checkpoints": 10,
    "zero_ref.lab.checkpoints.save_checkpoint": 0,
    "zero_ref.lab.checkpoints.load_checkpoint": 0,
    "zero_ref.lab.compare": 0,
    "zero_ref.lab.stage_3": 8,
    "zero_ref.lab.strategies": 0,
    "zero_ref.lab.plots": None,
    "zero_ref.lab.own": None,
    "zero_ref.lab.stairs": None,
    "zero_ref_course": None,
    "zero_ref_course.rungs": None,
}
"""The chapter of a name, or of a module's other names; 0 is the tour, None stands for all chapters."""

Index = Mapping[str, str]
VALUES = (types.UnionType,)
"""Types of entries that are neither function nor class: the text below them in the source explains them."""

# ------------------------------------------------------------------------------------- what there is


def shown() -> dict[str, str]:
    """Everything that the pages show, by full name, with the page."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        for name in re.findall(r"^\.\. auto\w+:: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            if name in found:
                raise ValueError(f"{name} is on {found[name]}.md and on {page.name}; one place is enough.")
            found[name] = page.stem
    return found


def load(name: str) -> Any:
    """The object with this full name: `module.name`."""
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def chapter_of(name: str) -> int | None:
    """The number of the chapter that teaches a name: its own in CHAPTER_OF, else its module's.

    >>> chapter_of("zero_ref.even"), chapter_of("zero_ref.plan.layout.lay_out")
    (3, 5)
    """
    while name not in CHAPTER_OF:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return CHAPTER_OF[name]


def chapter_file(number: int) -> str:
    """The document of a chapter, as Sphinx names it."""
    (path,) = (ROOT / "notebooks").glob(f"{number:02}_*.ipynb")
    return f"/notebooks/{path.stem}"


def index_of(names: Iterable[str]) -> dict[str, str]:
    """The full name for each name that docstrings may write, if only one thing can be meant.

    `zero_ref.even` may be written so, by the end of its path (`partition.even`), or by its last word. A last
    word that is also plain English (`trace`, `fit`) counts in its own module only, so it is not here.
    """
    written: dict[str, set[str]] = {}
    for name in names:
        thing = load(name)
        ways = {name}
        path = (name if isinstance(thing, VALUES) else f"{thing.__module__}.{thing.__qualname__}").split(".")
        ways |= {".".join(way[start:]) for way in (path, name.split(".")) for start in range(len(way) - 1)}
        ways |= {path[-1]} if says_what_it_is(path[-1]) else set()
        for member in documented_members(thing):
            ways_to_member = [name, path[-1]]
            for way in ways_to_member:
                written.setdefault(f"{way}.{member}", set()).add(f"{name}.{member}")
        for way in ways:
            written.setdefault(way, set()).add(name)
    return {way: targets.pop() for way, targets in written.items() if len(targets) == 1}


def says_what_it_is(word: str) -> bool:
    """Whether a word is no English word: it has a capital or an underscore in it.

    >>> says_what_it_is("held_bytes"), says_what_it_is("Slice"), says_what_it_is("trace")
    (True, True, False)
    """
    return "_" in word.strip("_") or word != word.lower()


def documented_members(thing: object) -> list[str]:
    """The methods and properties of a class that have an entry in the reference."""
    if not inspect.isclass(thing):
        return []
    return [
        name
        for name, member in vars(thing).items()
        if not name.startswith("_")
        and (
            inspect.isfunction(member)
            or isinstance(member, (classmethod, staticmethod))
            or is_property(member)
        )
        and member.__doc__
    ]


def is_property(member: object) -> bool:
    """Whether a class's member is read like a value."""
    return isinstance(member, property) or type(member).__name__ == "cached_property"


# ------------------------------------------------------------------------- from docstring to reStructuredText

Link = Callable[[str], str | None]

SECTION = r"(?:Args|Attributes|Returns|Raises|Warns|Collective|Cost|Source)"
HEADING = re.compile(rf"({SECTION}(?:(?:, | and ){SECTION})*):(?: (.*))?$")
ITEM = re.compile(r"([\w*., ]+?): (.*)$")
ITEMISED = ("Args", "Attributes", "Raises", "Warns")


def to_rest(lines: list[str], link: Link = lambda code: None) -> list[str]:
    """A docstring's lines as reStructuredText.

    >>> to_rest(["Half of `x`.", "", "Args:", "    x: even, a multiple of 2."])
    ['Half of ``x``.', '', ':Args:', '   ``x``', '      even, a multiple of 2.', '']

    Args:
        lines: with the indentation of a docstring taken off, as `inspect.cleandoc` does.
        link: returns the full name that a piece of code refers to, if that is in the reference.
    """
    starts = [i for i, line in enumerate(lines) if HEADING.match(line)] + [len(lines)]
    rest = list(text_to_rest(lines[: starts[0]], link))
    if rest and rest[-1]:
        rest.append("")
    for start, stop in pairwise(starts):
        heading = HEADING.match(lines[start])
        assert heading
        title, first = heading[1], heading[2] or ""
        body = inspect.cleandoc("\n".join(["", *lines[start + 1 : stop]])).splitlines()
        rest.append(f":{title}:")
        if title in ITEMISED and items_in(body):
            content = [*text_to_rest([first], link), ""] if first else []
            for names, text in items_in(body):
                content += [", ".join(f"``{name}``" for name in names)]
                content += ["   " + line for line in text_to_rest(text, link)]
        else:
            content = list(text_to_rest([first, *body] if first else body, link))
        rest += ["   " + line if line else "" for line in content] + [""]
    return rest


def items_in(body: list[str]) -> list[tuple[list[str], list[str]]]:
    """The items of a section: the names before the colon, and the lines of text. Empty if it has none.

    >>> items_in(["a, b: one", "    and more.", "c: two."])
    [(['a', 'b'], ['one', 'and more.']), (['c'], ['two.'])]
    """
    items: list[tuple[list[str], list[str]]] = []
    for line in body:
        found = None if line.startswith(" ") else ITEM.match(line)
        if found:
            items.append((found[1].split(", "), [found[2]]))
        elif items and (line.startswith(" ") or not line):
            items[-1][1].append(line.strip())
        else:
            return []
    return items


def text_to_rest(lines: list[str], link: Link) -> Iterator[str]:
    """Prose with `code` as reStructuredText; examples (`>>>`, to the next empty line) as they are."""
    prose: list[str] = []
    in_example = False
    for line in lines:
        in_example = line.lstrip().startswith(">>> ") or (in_example and bool(line.strip()))
        if not in_example:
            prose.append(line)
            continue
        if prose:
            yield from prose_to_rest("\n".join(prose), link).split("\n")
            if prose[-1]:
                yield ""  # an example begins a paragraph
            prose = []
        yield line
    if prose:
        yield from prose_to_rest("\n".join(prose), link).split("\n")


def prose_to_rest(text: str, link: Link = lambda code: None) -> str:
    r"""Prose with `code` in it as reStructuredText.

    >>> prose_to_rest("Two `Call`s of 2**7 bytes.")
    'Two ``Call``\\ s of 2\\*\\*7 bytes.'
    """
    parts = text.split("`")
    rest = []
    for i, part in enumerate(parts):
        if i % 2 == 0:
            rest.append(re.sub(r"([\\*|]|(?<=\w)_(?!\w))", r"\\\1", part))
            continue
        code = " ".join(part.split())
        target = link(code.removesuffix("()"))
        before = "\\ " if parts[i - 1][-1:].isalnum() else ""
        after = "\\ " if parts[i + 1][:1].isalnum() else ""
        rest.append(before + (f":py:obj:`{code} <{target}>`" if target else f"``{code}``") + after)
    return "".join(rest)


# ------------------------------------------------------------------------------------------- into Sphinx


def link_from(name: str, thing: object, index: Index, code: str) -> str | None:
    """Find the name that `code` means in the docstring of `thing`; its own arguments and itself are no links.

    Args:
        name: the full name of `thing` in the reference.
        index: as `index_of` gives it.
    """
    # A method's name ends in its own, a function's and a class's in theirs: siblings have the rest in common.
    if code in arguments_of(thing) or name.endswith(f".{code}"):
        return None
    own_module = getattr(thing, "__module__", None) or ""
    parent = name.rpartition(".")[0]
    ways = (f"{name}.{code}", f"{parent}.{code}", f"{own_module}.{code}", code)
    return next((index[way] for way in ways if way in index and index[way] != name), None)


def arguments_of(thing: object) -> set[str]:
    """The names of a function's or a class's arguments."""
    try:
        return set(inspect.signature(thing).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set()


def with_options(thing: object, lines: list[str]) -> list[str]:
    """The docstring of a dataclass with the help of those of its options that its Args leave out."""
    # The names in other dataclasses' annotations may be imported for the type checker alone, so only look up
    # those of a dataclass that has options.
    has_options = is_dataclass(thing) and any("Option(" in str(one.type) for one in fields(thing))
    if not has_options or "Args:" not in lines:
        return lines
    told = {found[1] for line in lines if (found := re.match(r"    (\w+): ", line))}
    options = [one for one in options_of(thing) if len(one.path) == 1]
    helps = {one.path[0]: one.option.help.removesuffix(" (default: %(default)s)") for one in options}
    added = [f"    {field}: {text}." for field, text in helps.items() if text and field not in told]
    end = lines.index("Raises:") if "Raises:" in lines else len(lines)
    return [*lines[:end], *added, *lines[end:]]


def rewrite(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """On autodoc-process-docstring: change `lines` in place."""
    index = app.zero_ref_index  # type: ignore[attr-defined]
    rest = to_rest(with_options(thing, lines), partial(link_from, name, thing, index))
    chapter = chapter_of(name)
    if chapter is not None and (name in CHAPTER_OF or name in app.zero_ref_shown):  # type: ignore[attr-defined]
        rest += [f":Chapter: :doc:`{chapter_file(chapter)}`", ""]
    lines[:] = rest


def skip(app: Sphinx, what: str, name: str, thing: object, skipped: bool, options: object) -> bool | None:
    """On autodoc-skip-member: skip a NamedTuple's fields, which its Args describe, and others' functions."""
    is_field = (getattr(thing, "__doc__", "") or "").startswith("Alias for field number")
    is_theirs = inspect.isfunction(thing) and not thing.__module__.startswith("zero_ref")
    return True if is_field or is_theirs else None


def mend_way_back(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """On html-page-context: link each piece of source to its entry, and make one list of all modules.

    viewcode expects that all of a module is documented under one name, `zero_ref` or the module's own. It
    puts the list of a package's modules between two items of the list of all, which HTML does not allow.
    """
    if not pagename.startswith("_modules/") or "body" not in context:
        return
    if pagename == "_modules/index":
        heading, *items = re.split(r"</?ul>", context["body"])
        context["body"] = f"{heading}<ul>{''.join(items)}</ul>"
        return
    module = pagename.removeprefix("_modules/").replace("/", ".")
    known = app.zero_ref_shown  # type: ignore[attr-defined]

    def mended(found: re.Match[str]) -> str:
        page, name = found[1], found[2].removeprefix(f"{module}.").removeprefix("zero_ref.")
        thing, *member = name.split(".")
        ways = [way for way in (f"zero_ref.{thing}", f"{module}.{thing}") if way in known]
        if not ways:  # no page shows it
            return '<a class="viewcode-back" hidden>'
        return f'<a class="viewcode-back" href="{page}#{".".join([ways[0], *member])}">'

    context["body"] = re.sub(r'<a class="viewcode-back" href="([^"#]*)#([^"]*)">', mended, context["body"])


class Taught(SphinxRole):
    """``{taught}`zero_ref.even` `` links the chapter that teaches a name."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Called by docutils."""
        number = chapter_of(self.text)
        if number is None:
            message = self.inliner.reporter.error(f"no chapter teaches {self.text}: see CHAPTER_OF in api.py")
            return [], [message]
        link = addnodes.pending_xref(
            refdomain="std", reftype="doc", reftarget=chapter_file(number), refexplicit=True, refwarn=True,
            refdoc=self.env.docname,
        )  # fmt: skip
        link += nodes.inline("", str(number) if number else "tour")
        return [link], []


def look_around(app: Sphinx) -> None:
    """On builder-inited: read which names the pages show."""
    app.zero_ref_shown = shown()  # type: ignore[attr-defined]
    app.zero_ref_index = index_of(app.zero_ref_shown)  # type: ignore[attr-defined]


def plain_types(app: Sphinx, thing: Any, bound: bool) -> None:
    """Leave the types in a signature, and not what `Annotated` adds for command lines."""
    if any("Annotated[" in str(of) for of in getattr(thing, "__annotations__", {}).values()):
        # A dataclass's __init__ also has the fields of its bases, whose types are names of their modules.
        owner = getattr(sys.modules[thing.__module__], thing.__qualname__.partition(".")[0])
        names: dict[str, Any] = {}
        for base in reversed(getattr(owner, "__mro__", ())):
            names |= vars(sys.modules[base.__module__])
        thing.__annotations__ = get_type_hints(thing, localns=names)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("autodoc-before-process-signature", plain_types)
    app.connect("builder-inited", look_around)
    app.connect("autodoc-process-docstring", rewrite)
    app.connect("autodoc-skip-member", skip)
    app.connect("html-page-context", mend_way_back)
    app.add_role("taught", Taught())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
