"""Cells that are edited and run in a page give what the package gives, with no other host to ask."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route
from reader import PATIENCE_MS, PHONE, Visit, darken

from zero_ref.live.cell import run

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]


def pages_to_try() -> Iterator[str]:
    """The addresses of the chapters that have cells to try."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if '"try-it"' in path.read_text(encoding="utf-8"):
            yield f"notebooks/{path.stem}.html"


@pytest.fixture
def page_to_try() -> str:
    """The address of one of them."""
    return next(pages_to_try())


def open_to_try(visit: Callable[..., Visit], address: str, **how: object) -> Visit:
    """A chapter with its predictions made, so that nothing is covered."""
    one = visit(address, **how)
    skip_predictions(one.page)
    return one


def skip_predictions(page: Page) -> None:
    for skip in page.locator(".prediction-skip").all():
        if skip.is_visible():
            skip.click()


def trials(page: Page) -> list[Locator]:
    return page.locator(".cell.tag_try-it").all()


def ended(cell: Locator) -> str:
    """Wait for a run to end; gives how."""
    cell.page.wait_for_function(
        "cell => cell.dataset.trial && cell.dataset.trial !== 'running'", arg=cell.element_handle()
    )
    return cell.get_attribute("data-trial") or ""


def edit(cell: Locator) -> None:
    cell.locator(".try-it-run").click()
    assert ended(cell) == "ran", cell.locator(".try-it-note").inner_text()


def typed(cell: Locator, text: str) -> str:
    """Put a text into an open cell, run it with the keyboard, and wait; gives how it ended."""
    editor = cell.locator("textarea")
    editor.fill(text)
    cell.evaluate("cell => delete cell.dataset.trial")
    editor.press("Shift+Enter")
    return ended(cell)


def result(cell: Locator) -> str:
    return cell.locator(".try-it-result").evaluate("result => result.textContent")


def told(page: Page, cell: Locator) -> tuple[list[str], str]:
    """Return the code that a page runs before a cell, and the cell's own code."""
    found = page.evaluate(
        """cell => {
            const trial = (script) => JSON.parse(script.textContent);
            const all = [...document.querySelectorAll("script.try-it")].map(trial);
            const mine = trial(cell.querySelector("script.try-it"));
            const source = Object.fromEntries(all.map((one) => [one.cell, one.source]));
            return [mine.before.map((one) => typeof one === "string" ? one : source[one.cell]), mine.source];
        }""",
        cell.element_handle(),
    )
    return found[0], found[1]


def changed(source: str) -> str:
    """A cell as a reader may edit it: with other numbers, and a line more."""
    other = re.sub(r"\b(64|1024|4|2)\b", lambda found: str(2 * int(found[0])), source)
    return f"{other}\nprint('edited')"


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(address, marks=pytest.mark.thorough if place else ())
        for place, address in enumerate(pages_to_try())
    ],
)
def test_a_cell_prints_what_the_page_and_the_package_print_as_it_stands_and_edited(
    visit: Callable[..., Visit], chapter: str
) -> None:
    one = open_to_try(visit, chapter)
    cells = trials(one.page)
    assert cells
    for cell in cells:
        on_the_page = "".join(cell.locator(".output.stream pre").all_text_contents())
        before, source = told(one.page, cell)
        edit(cell)
        assert result(cell).strip() == on_the_page.strip()
        assert result(cell) == run(before, source).printed
        assert not cell.locator(".output.stream").first.is_visible()
        how = typed(cell, changed(source))
        expected = run(before, changed(source))
        assert cell.locator(".try-it-result pre").first.is_visible()
        if expected.error:
            assert how == "raised"
            assert result(cell).splitlines()[-1] == expected.error.splitlines()[-1]
        else:
            assert how == "ran"
            assert expected.printed.endswith("edited\n")
            assert result(cell) == expected.printed
    assert len(one.page.workers) == 1
    assert one.trouble() == []


@pytest.mark.thorough
def test_a_cell_uses_what_its_reader_made_of_a_cell_above(
    visit: Callable[..., Visit], page_to_try: str
) -> None:
    """No chapter has a cell that needs another one; here the page says that the second needs the first."""
    one = visit("book/index.html")
    first_name = ""

    def joined(route: Route) -> None:
        nonlocal first_name
        answer = route.fetch()
        begin, *others = answer.text().split('"before": [')
        first_name = begin.rpartition('{"cell": "')[2].partition('"')[0]
        others[1] = f'{{"cell": "{first_name}"}}, {others[1]}'
        route.fulfill(response=answer, body='"before": ['.join([begin, *others]))

    one.page.route(f"**/{page_to_try}", joined)
    one.page.goto(one.site + page_to_try, wait_until="load")
    skip_predictions(one.page)
    first, second, *_ = trials(one.page)
    edit(first)
    assert typed(first, "above = 7\nprint(above)") == "ran"
    edit(second)
    assert typed(second, "print(2 * above)") == "ran"
    assert result(second) == "14\n"
    assert typed(first, "raise ValueError('above')") == "raised"
    assert typed(second, "print(2 * above)") == "raised"
    assert result(second).splitlines()[-1] == "ValueError: above"
    assert one.trouble() == []


def test_an_error_is_a_traceback_and_the_cell_can_be_put_back(
    visit: Callable[..., Visit], page_to_try: str
) -> None:
    one = open_to_try(visit, page_to_try)
    cell = trials(one.page)[0]
    was = cell.locator(".output.stream").first.text_content()
    edit(cell)
    assert typed(cell, "ranks = 4\nprint(ranks)\nprint(rank)") == "raised"
    first, *lines = result(cell).splitlines()
    assert first == "4Traceback (most recent call last):" or first == "4"
    assert lines[-1].startswith("NameError: name 'rank' is not defined")
    assert "<this cell>" in result(cell)
    cell.locator(".try-it-back").click()
    assert cell.locator("textarea").is_hidden()
    assert cell.locator(".cell_input").is_visible()
    assert cell.locator(".output.stream").first.is_visible()
    assert cell.locator(".output.stream").first.text_content() == was
    assert one.trouble() == []


def test_a_cell_that_never_ends_is_stopped_and_another_runs(
    visit: Callable[..., Visit], page_to_try: str
) -> None:
    one = open_to_try(visit, page_to_try)
    cell = trials(one.page)[0]
    edit(cell)
    was = result(cell)
    cell.locator("textarea").fill("while True:\n    pass")
    cell.evaluate("cell => delete cell.dataset.trial")
    cell.locator("textarea").press("Control+Enter")
    one.page.wait_for_selector(".tag_try-it[data-trial=running]")
    assert cell.locator(".try-it-run").inner_text() == "Stop"
    cell.locator(".try-it-run").click()
    assert ended(cell) == "failed"
    assert cell.locator(".try-it-note").inner_text() == "Stopped."
    cell.locator(".try-it-back").click()
    edit(cell)
    assert result(cell) == was
    assert one.trouble() == []


@pytest.mark.thorough
def test_it_can_be_done_with_a_keyboard(visit: Callable[..., Visit], page_to_try: str) -> None:
    page = open_to_try(visit, page_to_try).page
    cell = trials(page)[0]
    cell.locator(".try-it-run").focus()
    page.keyboard.press("Enter")
    assert ended(cell) == "ran"
    assert page.evaluate("document.activeElement.className") == "try-it-editor"
    page.keyboard.press("Control+a")
    page.keyboard.type("for rank in range(2):")
    page.keyboard.press("Enter")
    page.keyboard.type("print(rank)")
    assert cell.locator("textarea").input_value() == "for rank in range(2):\n    print(rank)"
    page.keyboard.press("Tab")  # no trap
    assert page.evaluate("document.activeElement.className") == "try-it-run"
    cell.evaluate("cell => delete cell.dataset.trial")
    page.keyboard.press("Enter")
    assert ended(cell) == "ran"
    assert result(cell) == "0\n1\n"


def test_before_the_prediction_there_is_no_result_and_before_the_button_no_python(
    visit: Callable[..., Visit], page_to_try: str
) -> None:
    one = visit(page_to_try)
    page = one.page
    page.evaluate("localStorage.clear()")
    page.reload()
    covered = page.locator(".cell.tag_try-it:has(> .prediction-cover[hidden])")
    assert covered.count() > 0
    assert not covered.first.locator(".try-it-bar").is_visible()
    skip_predictions(page)
    assert trials(page)[0].locator(".try-it-run").is_visible()
    assert not any("pyodide" in url for url in one.requests)
    assert page.workers == []


@pytest.mark.thorough
def test_on_a_phone_it_fits_and_shuts_nobody_out(
    visit: Callable[..., Visit], axe: str, page_to_try: str
) -> None:
    page = open_to_try(visit, page_to_try, width=PHONE).page
    for cell in trials(page):
        edit(cell)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    page.evaluate(axe)
    for look in (lambda: None, lambda: darken(page)):
        look()
        found = page.evaluate("axe.run('.tag_try-it').then((result) => result.violations)")
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


@pytest.mark.thorough
def test_a_page_opened_from_a_disk_says_how_to_start_python(
    pages: Path, browser: object, page_to_try: str
) -> None:
    page = browser.new_page()  # type: ignore[attr-defined]
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"file://{pages}/{page_to_try}")
    skip_predictions(page)
    cell = trials(page)[0]
    cell.locator(".try-it-run").click()
    assert ended(cell) == "failed"
    assert "python -m http.server" in cell.locator(".try-it-note").inner_text()
    page.close()
