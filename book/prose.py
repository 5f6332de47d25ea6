"""Numbers in prose, for book/unasserted.py: which there are, and which of them make a claim.

Claims are numbers of ten and more, numbers with decimals, and any number before `%`, "times", Ψ, or a unit of
bytes, time or messages; in digits or in words. These are no claims: small numbers that set the scene ("on two
ranks"), labels ("chapter 18", "rank 3"), widths of types ("16 bits"), names and versions, code, powers such
as $10^9$ that define a unit, and words for shares: "half", "a third", "twice".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

ONES = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NTHS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"]
WORDS = {word: n for n, word in enumerate([*ONES.split(), "seventeen", "eighteen", "nineteen"], 1)}
WORDS |= {ten: 10 * n for n, ten in enumerate(TENS, 2)}
for _ten in TENS:
    for _words in (ONES.split(), NTHS):
        WORDS |= {f"{_ten}-{word}": WORDS[_ten] + n for n, word in enumerate(_words[:9], 1)}

SCALES = {
    "hundred": 1e2,
    "thousand": 1e3,
    "million": 1e6,
    "billion": 1e9,
    "trillion": 1e12,
    "%": 0.01,
    "percent": 0.01,
}
SCALES |= {f"{prefix}B": 1e3**n for n, prefix in enumerate(["k", "M", "G", "T"], 1)} | {"KB": 1e3}
SCALES |= {f"{prefix}iB": 1024.0**n for n, prefix in enumerate(["K", "M", "G", "T"], 1)}
SCALES |= {
    "ms": 1e-3,
    "milliseconds": 1e-3,
    "µs": 1e-6,
    "microseconds": 1e-6,
    "TFLOPS": 1e12,
    "megabytes": 1e6,
    "gigabytes": 1e9,
}
NAMED = {unit: {unit.lower(), "nbytes"} for unit in SCALES if unit.endswith(("B", "bytes"))} | {
    "bytes": {"nbytes", "bytes"}
}
NAMED |= {
    "ms": {"ms"},
    "milliseconds": {"ms"},
    "µs": {"us"},
    "microseconds": {"us"},
    "s": {"s"},
    "seconds": {"s"},
}
"""The parts of names in code that name a unit."""

PERCENT = ("%", "percent")
COUNTING = ("hundred", "thousand", "million", "billion", "trillion")
MEASURED = {
    *PERCENT,
    *NAMED,
    "times",
    "×",
    "x",
    "byte",
    "second",
    "Ψ",
    "message",
    "messages",
    "calls",
    "collectives",
}
UNITS = sorted({*SCALES, *MEASURED, "call"}, key=len, reverse=True)
UNIT = rf"(?:(?:{'|'.join(UNITS)})(?!\w)(?! \d)|%)"
VALUE = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e-?\d+)?"
WORD = "|".join(sorted(WORDS, key=len, reverse=True))
NUMBER = re.compile(
    rf"(?<![\w.,])(?<![A-Za-z]-)(?P<value>{VALUE}|\b(?i:{WORD})\b)(?:/(?P<below>\d+))?"
    rf"(?![\d\w]|,\d|\.\d|[\s-]?bits?\b)(?:[\s-]?(?P<unit>{UNIT}))?(?!\w)",
)
LABELLED = (
    "chapter|section|table|figure|equation|exercise|rank|stage|step|iteration|level|bucket|block|layer|parameter|row"
    "|line|worker|machine|batch|epoch|group|tensor|element|column|message|slot"
    "|ZeRO|torch|PyTorch|Python|version|FairScale"
)
LABEL = re.compile(rf"\b(?:{LABELLED})s? \d[\d.,]*\d?(?:(?:, and|,| and| or| to) \d+)*\b(?!\s?{UNIT})", re.I)
NAMES = re.compile(r"arXiv:[\d.]+|CC BY [\d.]+|Llama[ -][\d.]+[ -]\d+B|GPT-\d|RTX \d+")


class Number(NamedTuple):
    """A number as it is written: "4.2 GB" is 4.2, with one decimal, in GB."""

    text: str
    value: float
    decimals: int
    unit: str

    @property
    def counts(self) -> bool:
        """Whether it is a claim, and not a small number that sets the scene."""
        if self.text.lower().startswith("one ") and self.unit not in PERCENT:
            return False
        return self.value >= 10 or self.decimals > 0 or bool(self.unit)

    def is_(self, literal: float) -> bool:
        """Whether a literal, as it is or in the number's unit, rounds to the number."""
        readings = {literal / SCALES.get(self.unit, 1.0)}
        if self.unit in PERCENT:
            readings |= {100 * (literal - 1), 100 * (1 - literal)}
        elif self.unit not in COUNTING or self.decimals:
            readings.add(literal)
        rounded = self.decimals > 0 or (bool(self.unit) and self.value >= 10)
        most = (0.5 + 1e-9) * 10.0**-self.decimals if rounded else 1e-9 * self.value
        return any(abs(reading - self.value) <= most for reading in readings)


# ------------------------------------------------------------------------------------------- reading prose


def blocks(markdown: str) -> Iterator[str]:
    """Paragraphs, list items and table rows, without code and comments, each on one line."""
    markdown = re.sub(r"^( *)(```+).*?^ *\2\s*$|<!--.*?-->", "", markdown, flags=re.M | re.S)
    paragraph: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        text = line.strip()
        if paragraph and (
            not text or re.match(r"\||#+ |[-*] |\d+\. |:::|<", text) or paragraph[0][0] in "|#"
        ):
            yield re.sub(r"^#+ (Exercise )?[\d.:]* ?|^[-*] |^\d+\. ", "", " ".join(paragraph))
            paragraph = []
        if text and not re.match(r":(:::*\{?|[\w-]+:)|\|[-:| ]+\|$|\(\S+\)=$|</?\w+>$", text):
            paragraph.append(text.removeprefix("> "))


def sentences(block: str) -> list[str]:
    """A block's sentences. A row of a table is one."""
    return [block] if block.startswith("|") else re.split(r"(?<=[.?!:]) +(?=[(*`{\[$]*[A-Z*`{\[$])", block)


def plain(text: str) -> str:
    """A sentence without the parts whose digits are no numbers: citations, addresses, code, names, labels."""
    text = re.sub(r"\{cite:?\w*\}`[^`]*`", "", text)
    text = re.sub(r"\{\w+\}`([^`<]*?)\s*(?:<[^`]*>)?`", r"\1", text)
    # Links to works, by authors and year; a row's number; links to chapters, figures and equations.
    text = re.sub(r"\[[^\]]*(?:, \d[\d.]*|\(\d{4}\))\]\(http[^)]*\)", "", text)
    text = re.sub(r"^\| *\d+ *\||\[[^\]]*\]\([^)]*\.ipynb(?:#[^)]*)?\)", "", text)
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "]", text)
    text = re.sub(rf"`({VALUE})`", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\$\$?(.+?)\$\$?", lambda math: f" {still_open(math[1])} ", text)
    return LABEL.sub("", NAMES.sub("", re.sub(r"\s+", " ", text.replace("*", ""))))


PYTHON_OF_LATEX = {
    r"\{,\}": "",
    r"\\[td]?frac\{([^{}]*)\}\{([^{}]*)\}": r"((\1)/(\2))",
    r"\\(cdot|times)": "*",
    r"\\(left|right|,|;|!|quad|%)|\\text\{[^}]*\}": " ",
    r"\^\{([^{}]*)\}": r"**(\1)",
    r"\^": "**",
    r"\\approx": "~",
    r"\\Psi": "Ψ",
}
UNTRUE = "987654321"  # stands for a formula whose sides are not equal; no literal is this number


def still_open(latex: str) -> str:
    """Return the part of a formula that needs an assert: nothing of a true equation, else numbers and Ψ."""
    for pattern, python in PYTHON_OF_LATEX.items():
        latex = re.sub(pattern, python, latex)
    sides = [side.strip() for side in re.split("[=~]", latex)]
    if len(sides) > 1 and all(re.fullmatch(r"[\d.+*/() -]+", side) for side in sides):
        values = [float(eval(side)) for side in sides]
        decimals = [len(side.partition(".")[2]) for side in sides if re.fullmatch(r"[\d.]+", side)]
        most = 0.5 * 10.0 ** -min(decimals) if decimals and "~" in latex else 1e-9
        return "" if all(abs(one - other) <= most for one, other in pairwise(values)) else f"= {UNTRUE}"
    latex = re.sub(r"[\d.]+\*\*\(?-?\d+\)?", " ", latex)  # a power defines
    found = re.findall(r"(?<![\w.])(\d[\d.]*) ?(Ψ?)", latex)
    return ", ".join(
        f"{digits} {psi}" for digits, psi in found if psi or "." in digits or float(digits) >= 10
    )


def numbers(text: str) -> Iterator[Number]:
    """The numbers of a sentence that count."""
    for found in NUMBER.finditer(plain(text)):
        digits = str(WORDS.get(found["value"].lower(), found["value"].replace(",", "")))
        number = Number(found[0].strip(), float(digits), len(digits.partition(".")[2]), found["unit"] or "")
        if found["below"]:
            share = number.value / int(found["below"])
            number = number._replace(value=share if share != 1 / int(found["below"]) else int(found["below"]))
        if number.counts:
            yield number
