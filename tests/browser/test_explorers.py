"""Explorers in a browser: moved through their range they give what the package gives."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from playwright.sync_api import Locator, Page
from reader import PATIENCE_MS, PHONE, Visit, darken

from zero_ref.live import EXPLORERS
from zero_ref.live.explorer import Control, Value

PAGE = "book/explorers.html"
CHAPTERS = {
    "memory": "notebooks/01_ledger.html",
    "buckets": "notebooks/05_buckets.html",
    "partition": "notebooks/03_partition.html",
    "overlap": "notebooks/06_overlap.html",
    "which": "notebooks/09_which_stage.html",
    "search": PAGE,
}
pytestmark = pytest.mark.browser


def part(page: Page, name: str) -> Locator:
    return page.locator(f'.explorer[data-explorer="{name}"]')


def start(page: Page, name: str) -> Locator:
    section = part(page, name)
    section.locator(".explorer-start").click()
    page.wait_for_selector(f'[data-explorer="{name}"]:is([data-state=live], [data-state=failed])')
    assert section.get_attribute("data-state") == "live", section.locator(".explorer-note").inner_text()
    return section


def move(section: Locator, name: str, control: str, value: Value) -> None:
    """Set one control as a hand would, and tell the page."""
    listed = next(one for one in EXPLORERS[name].controls if one.name == control)
    place = list(listed.options).index(value)
    section.locator(f"#explorer-{name}-{control}").evaluate(
        """(input, place) => {
            if (input.type === "checkbox") input.checked = place === 1;
            else input.value = place;
            input.dispatchEvent(new Event(input.type === "range" ? "input" : "change"));
        }""",
        place,
    )


def settled(section: Locator, values: Mapping[str, Value]) -> None:
    """Wait until the page shows these values."""
    section.evaluate(
        """async (section, wanted) => {
            const same = () => {
                const shown = JSON.parse(section.dataset.shown ?? "{}");
                return Object.entries(wanted).every(([name, value]) => shown[name] === value);
            };
            for (let waits = 0; !same() || section.hasAttribute("aria-busy"); waits++) {
                if (waits > 60000) throw new Error(`shows ${section.dataset.shown}`);
                await new Promise((resolve) => setTimeout(resolve, 10));
            }
        }""",
        dict(values),
    )


def drawn(svg: str) -> list[tuple[str, dict[str, str], str]]:
    """Each element of a picture, in order."""
    return [
        (one.tag, dict(one.attrib), (one.text or "").strip()) for one in ElementTree.fromstring(svg).iter()
    ]


def options_of(name: str, control: Control) -> Sequence[Value]:
    """All options; of what takes Python in a browser seconds, only the first and the last."""
    slow = name in ("search", "which")
    return control.options[:: max(1, len(control.options) - 1)] if slow else control.options


def settings_of(name: str, every: bool) -> Iterator[dict[str, Value]]:
    """All controls at their ends; before that each through its options, the others at their start."""
    explorer = EXPLORERS[name]
    for control in explorer.controls if every else ():
        for option in options_of(name, control):
            yield {**explorer.values, control.name: option}
    for end in (0, -1):
        yield {control.name: control.options[end] for control in explorer.controls}


def assert_as_the_package(page: Page, name: str, every: bool) -> None:
    section = start(page, name)
    width = section.evaluate("section => Math.floor(section.querySelector('.explorer-picture').clientWidth)")
    width = max(280, min(760, width))
    now, compared = dict(EXPLORERS[name].values), 0
    for values in settings_of(name, every):
        for control, value in values.items():
            if now[control] != value:
                move(section, name, control, value)
        now = dict(values)
        settled(section, now)
        answer = EXPLORERS[name].answer(width, **now)
        shown = section.evaluate(
            """section => ({
                svg: new XMLSerializer().serializeToString(section.querySelector("svg")),
                words: section.querySelector(".explorer-words").textContent,
                table: [...section.querySelectorAll("tr")].map(
                    (row) => [...row.cells].map((cell) => cell.textContent)
                ),
                idle: Object.fromEntries(
                    [...section.querySelectorAll("input:disabled, select:disabled")].map((input) => [
                        input.id.split("-").pop(),
                        document.getElementById(input.getAttribute("aria-describedby")).textContent,
                    ])
                ),
            })"""
        )
        assert shown["words"] == answer.words
        assert shown["table"] == [list(row) for row in answer.table]
        assert shown["idle"] == answer.idle
        assert drawn(shown["svg"]) == drawn(answer.svg), now
        compared += 1
    controls = EXPLORERS[name].controls if every else ()
    assert compared == 2 + sum(len(options_of(name, control)) for control in controls)


def test_at_its_ends_each_explorer_gives_the_packages_picture_words_and_numbers(
    visit: Callable[..., Visit],
) -> None:
    one = visit(PAGE)
    for name in CHAPTERS:  # "ring" has its slider alone
        assert_as_the_package(one.page, name, every=False)
    assert one.trouble() == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHAPTERS)
def test_so_it_does_in_its_chapter_along_each_control(visit: Callable[..., Visit], name: str) -> None:
    one = visit(CHAPTERS[name])
    assert_as_the_package(one.page, name, every=True)
    assert one.trouble() == []


def test_nothing_of_python_is_fetched_until_the_reader_asks(visit: Callable[..., Visit]) -> None:
    one = visit(PAGE)
    assert not any("pyodide" in url for url in one.requests)
    assert one.page.workers == []
    assert part(one.page, "memory").locator("svg").count() == 2
    start(one.page, "memory")
    start(one.page, "partition")
    assert len(one.page.workers) == 1  # one Python for all explorers of a page


@pytest.mark.thorough
def test_all_of_it_can_be_done_with_a_keyboard(visit: Callable[..., Visit]) -> None:
    page = visit(PAGE).page
    section = part(page, "partition")
    section.locator(".explorer-start").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-explorer="partition"][data-state=live]')
    assert page.evaluate("document.activeElement.id") == "explorer-partition-model"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "explorer-partition-ranks"
    page.keyboard.press("ArrowRight")
    settled(section, {"ranks": 48})
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "48"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    settled(section, {"ranks": 48, "fullest_first": True})
    assert "llama3-8b on 48 ranks" in section.locator(".explorer-words").inner_text()


@pytest.mark.thorough
def test_on_a_phone_it_fits_and_shuts_nobody_out(visit: Callable[..., Visit], axe: str) -> None:
    page = visit(PAGE, width=PHONE).page
    for name in CHAPTERS:
        start(page, name)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    for svg in page.locator('[data-state="live"] svg').all():
        assert float(svg.get_attribute("width") or 0) == pytest.approx(svg.bounding_box()["width"], abs=1)  # type: ignore[index]
    page.evaluate(axe)
    for look in (lambda: None, lambda: darken(page)):
        look()
        found = page.evaluate("axe.run('.explorer').then((result) => result.violations)")
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


@pytest.mark.thorough
def test_a_dragged_slider_ends_at_the_last_setting(visit: Callable[..., Visit]) -> None:
    page = visit(PAGE).page
    section = start(page, "overlap")
    for ranks in (1, 2, 8, 64, 1024, 128):  # faster than they can be answered
        move(section, "overlap", "ranks", ranks)
    settled(section, {"ranks": 128})
    assert "on 128 ranks of" in section.locator(".explorer-words").inner_text()


@pytest.mark.thorough
def test_pages_opened_from_a_disk_say_how_to_start_python(pages: object, browser: object) -> None:
    page = browser.new_page()  # type: ignore[attr-defined]
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"file://{pages}/{PAGE}")
    part(page, "memory").locator(".explorer-start").click()
    note = part(page, "memory").locator(".explorer-note")
    assert "python -m http.server" in note.inner_text()
    assert part(page, "memory").get_attribute("data-state") == "failed"
    page.close()


def test_without_python_to_fetch_the_reader_is_told_and_can_try_again(visit: Callable[..., Visit]) -> None:
    one = visit(PAGE)
    one.page.context.route("**/zero_ref.zip", lambda route: route.fulfill(status=503))
    section = part(one.page, "which")
    section.locator(".explorer-start").click()
    one.page.wait_for_selector('[data-explorer="which"][data-state=failed]')
    assert "did not start" in section.locator(".explorer-note").inner_text()
    assert section.locator(".explorer-start").is_enabled()
    one.page.context.unroute("**/zero_ref.zip")
    start(one.page, "which")
    assert json.loads(section.get_attribute("data-shown") or "{}")["model"] == "llama3-8b"
