"""Predictions, sliders and ticks on the pages: asked first, kept, compared as in the package."""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, Page
from reader import Visit

from zero_ref.live import EXPLORERS
from zero_ref.live.page import frames
from zero_ref_course.predictions import prediction_named

CHAPTER = "notebooks/03_partition.html"
NAME = "partition.crossover"
pytestmark = pytest.mark.browser


@pytest.fixture
def page(visit: Callable[..., Visit]) -> Page:
    """Chapter 3 as somebody sees it who has predicted nothing."""
    return fresh(visit, CHAPTER)


def fresh(visit: Callable[..., Visit], address: str) -> Page:
    page: Page = visit(address).page
    page.evaluate("localStorage.clear()")
    page.reload()
    return page


def box(page: Page, name: str = NAME) -> Locator:
    return page.locator(f'.prediction[data-prediction="{name}"]')


def result(page: Page, name: str = NAME) -> Locator:
    return page.locator(f'.prediction-result[data-prediction="{name}"]')


def commit(page: Page, said: str, name: str = NAME) -> None:
    box(page, name).locator("input").fill(said)
    box(page, name).get_by_role("button", name="Commit").click()


def test_results_are_covered_until_the_reader_commits(page: Page) -> None:
    assert not result(page).is_visible()
    assert not page.get_by_text("733 ranks have nothing to own").is_visible()  # the text about them
    commit(page, "3")
    assert result(page).is_visible()
    assert not box(page).locator("form").is_visible()
    page.reload()
    assert result(page).is_visible(), "it was not kept"
    assert not result(page, "partition.even").is_visible(), "the others stay covered"


@pytest.mark.parametrize(
    "said", [3.0, *(pytest.param(said, marks=pytest.mark.thorough) for said in (4.2, 1000.0))]
)
def test_a_page_compares_as_the_package_does(page: Page, said: float) -> None:
    commit(page, f"{said}")
    words = page.locator(".prediction-outcome").first.inner_text()
    assert words == prediction_named(NAME).compared(said)
    points = prediction_named(NAME).points(said)
    assert (
        page.locator(".prediction-score")
        .inner_text()
        .startswith(f"Predictions of this chapter: {points:g} of ")
    )


@pytest.mark.thorough
def test_a_choice_is_compared_too(page: Page) -> None:
    one = box(page, "partition.may_cut")
    one.locator("select").select_option("both")
    one.get_by_role("button", name="Commit").click()
    assert prediction_named("partition.may_cut").compared("both") in page.locator("main").inner_text()


@pytest.mark.thorough
def test_what_is_no_number_is_not_committed(page: Page) -> None:
    commit(page, "a lot")
    assert box(page).locator(".prediction-said").inner_text() == "A number is asked for."
    assert not result(page).is_visible()


def test_results_can_be_seen_without_a_prediction_and_on_paper(page: Page) -> None:
    page.emulate_media(media="print")
    assert result(page).is_visible()
    page.emulate_media(media="screen")
    assert not result(page).is_visible()
    box(page).get_by_role("button", name="Skip: show the answer").click()
    assert result(page).is_visible()
    assert page.locator(".prediction-outcome").first.inner_text() == ""


def test_a_chapter_read_to_its_end_gets_a_tick_until_the_reader_starts_again(page: Page) -> None:
    read = page.locator("nav a.chapter-read")
    assert read.count() == 0
    commit(page, "3")
    page.locator(".prev-next-footer, .prev-next-area").first.scroll_into_view_if_needed()
    page.wait_for_selector("nav a.chapter-read", state="attached")
    assert read.all_inner_texts() == [page.locator("article h1").inner_text().rstrip("#")]
    page.get_by_role("button", name="Start again").click()
    page.wait_for_load_state()
    assert read.count() == 0
    assert not result(page).is_visible()


def test_a_slider_moves_the_picture_without_python(visit: Callable[..., Visit]) -> None:
    one = visit("book/explorers.html")
    for name in (name for name, explorer in EXPLORERS.items() if explorer.along):
        asked: list[str] = []
        one.page.on("request", lambda request, asked=asked: asked.append(request.url))
        section = one.page.locator(f'.explorer[data-explorer="{name}"]')
        made: Any = frames(name)
        last = len(made["answers"]) - 1
        section.locator(".explorer-frames input").evaluate(
            "(input, place) => { input.value = place; input.dispatchEvent(new Event('input')); }", last
        )
        one.page.wait_for_selector(f'[data-explorer="{name}"][data-frame="{last}"]')
        assert section.locator(".explorer-words").inner_text() == made["answers"][last]["words"]
        table = section.locator(".explorer-table tr").evaluate_all(
            "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        assert table == [list(row) for row in made["answers"][last]["table"]]
        files = [url.rpartition("/")[2] for url in asked]
        files = [file for file in files if file != "favicon.svg"]  # asked for when the browser likes
        assert files == [f"{name}.js"]
    assert one.trouble() == []
