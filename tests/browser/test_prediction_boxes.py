"""Predictions, sliders and ticks on the pages: asked first, kept, compared as in the package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page
from reader import Visit

from zero_ref.live import EXPLORERS
from zero_ref.live.page import frames
from zero_ref_course.predictions import prediction_named

CHAPTER = "notebooks/03_partition.html"
OTHER = "notebooks/13_matrices.html"
NAME = "partition.crossover"

# Words that a reader cannot see and that no visible mark stands for: a bar of a fold, or the line in a gap.
WITHOUT_A_MARK = """() => {
    const found = [], article = document.querySelector("article");
    const texts = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
    const seen = (element) => element.checkVisibility();
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        const holder = text.parentElement;
        if (!text.data.trim() || seen(holder)) continue;
        if (holder.closest("script, style, template, svg, mjx-container")) continue;
        const fold = holder.closest("details:not([open])");
        if (fold && seen(fold.querySelector("summary"))) continue;
        const cover = holder.closest(".prediction-cover[hidden]");
        const gap = cover?.previousElementSibling;
        if (gap?.matches(".prediction-gap") && seen(gap) && /^Covered: \\d+ /.test(gap.textContent)) continue;
        if (holder.closest(".prediction form, .prediction-gap, .figure-larger, .try-it-bar")) continue;
        if (holder.matches(".zero-animation label")) continue;  // without motion there is nothing to pause
        found.push(...text.data.trim().split(/\\s+/));
    }
    return found;
}"""

# Headings whose first block is covered, and a chapter's picture if it is.
NEVER_COVERED = """() => {
    const cover = ".prediction-cover[hidden]";
    const covered = (block) => block?.closest(cover) || block?.matches(`${cover}, .prediction-gap`);
    const headings = [...document.querySelectorAll("article :is(h1, h2, h3)")];
    const picture = headings.find((one) => one.firstChild.textContent.trim() === "The picture")
        ?.parentElement.querySelector(".cell_output img, .cell_output svg");
    const hidden = headings.filter((one) => covered(one) || covered(one.nextElementSibling));
    return [...hidden.map((one) => one.textContent), ...(covered(picture) ? ["the picture"] : [])];
}"""

CHAPTERS = [
    pytest.param(
        f"notebooks/{path.stem}.html", marks=() if path.stem[:2] in {"03", "13"} else pytest.mark.thorough
    )
    for path in sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
]
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


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_nothing_is_covered_without_a_mark_nor_a_heading_s_first_words(
    visit: Callable[..., Visit], chapter: str
) -> None:
    page = fresh(visit, chapter)
    assert page.evaluate(WITHOUT_A_MARK) == []
    assert page.evaluate(NEVER_COVERED) == []
    page.evaluate("document.querySelectorAll('.prediction-gap').forEach((gap) => gap.remove())")
    if page.locator(".prediction").count():
        assert page.evaluate(WITHOUT_A_MARK), "what is covered is not counted"


def test_the_line_in_a_gap_says_what_is_covered_and_leads_to_the_box_or_to_the_answer(page: Page) -> None:
    gaps = page.locator(".prediction-gap:visible")
    assert gaps.first.inner_text() == "Covered: 1 output. Commit, or show."
    assert gaps.nth(1).inner_text() == "Covered: 1 paragraph, 1 figure. Commit, or show."
    gaps.nth(1).get_by_role("button", name="Commit").click()
    assert page.evaluate("document.activeElement.id") == "prediction-partition-crossover"
    gaps.nth(1).get_by_role("button", name="show").click()
    assert result(page).is_visible()
    assert box(page).locator(".prediction-said").inner_text() == "Shown without a prediction."


def test_one_switch_shows_all_answers_of_a_page_and_one_those_of_the_book(
    visit: Callable[..., Visit],
) -> None:
    page = fresh(visit, CHAPTER)
    answers = page.locator(".prediction-result")
    page.get_by_role("button", name="Show all on this page").click()
    assert all(one.is_visible() for one in answers.all())
    assert not page.locator(".prediction-gap:visible").count()
    page.goto(page.url.replace(CHAPTER, OTHER))
    assert not any(one.is_visible() for one in answers.all())
    page.get_by_role("button", name="Show all in the book").click()
    assert all(one.is_visible() for one in answers.all())
    page.goto(page.url.replace(OTHER, CHAPTER))
    assert all(one.is_visible() for one in answers.all())
    page.get_by_role("button", name="Cover them again").click()
    assert not any(one.is_visible() for one in answers.all())


def test_a_search_in_the_page_and_a_link_find_what_is_covered(page: Page) -> None:
    covers = page.locator(".prediction-cover")
    assert {one.get_attribute("hidden") for one in covers.all()} == {"until-found"}
    page.goto(f"{page.url}#fig-loads-64")
    page.wait_for_function("document.getElementById('fig-loads-64').checkVisibility()")
    assert result(page).is_visible(), "the whole answer is shown"


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
