"""Every page of the book, opened in Chromium: it reads offline, for every reader, on every screen."""

import pytest
from reader import PHONE, Visit, darken

pytestmark = pytest.mark.browser

# All folds open, and at once: a colour on its way to another is neither.
UNFOLD = """() => {
    const still = document.createElement("style");
    still.textContent = "*, ::before, ::after { animation: none !important; transition: none !important; }";
    document.head.append(still);
    document.querySelectorAll("details").forEach(fold => { fold.open = true; });
    document.querySelectorAll(".prediction-cover").forEach(cover => { cover.removeAttribute("hidden"); });
}"""

# Of the words in a block of code that look alike, one keeps a box of its own: axe-core looks at each box,
# and most boxes of the book are such words. The others become text of the block, whose colour it sees.
MERGE_CODE = """() => {
    for (const block of document.querySelectorAll(".highlight pre, code.highlight, .sig")) {
        const seen = new Set();
        for (const word of block.querySelectorAll("span[class]:not(:has(*))")) {
            const look = `${word.className} in ${word.parentElement.className}`;
            if (seen.has(look)) word.replaceWith(word.textContent);
            seen.add(look);
        }
        block.normalize();
    }
}"""

# axe-core's own four levels are minor, moderate, serious and critical.
RUN_AXE = """async (options) => {
    const found = await axe.run(document, {resultTypes: ["violations"], ...options});
    return found.violations
        .filter(rule => ["serious", "critical"].includes(rule.impact))
        .flatMap(rule => rule.nodes.map(node =>
            `${rule.id}: ${node.target.join(" ")}: ${[...node.any, ...node.all, ...node.none][0]?.message}`));
}"""

# What sticks out of the window and is in no box that scrolls or cuts off by itself.
STICKS_OUT = """() => {
    const width = document.documentElement.clientWidth, held = element => {
        for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
            if (getComputedStyle(box).overflowX !== "visible" || getComputedStyle(box).position === "fixed")
                return true;
        return false;
    };
    if (document.documentElement.scrollWidth <= width) return [];
    return [`the page is ${document.documentElement.scrollWidth} px wide in a window of ${width} px`].concat(
        [...document.body.querySelectorAll("*")]
            .filter(e => e.getBoundingClientRect().right > width + 0.5 && !held(e))
            .slice(0, 8).map(e => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 60)}`));
}"""

# Words in tables that are set on more than one line. A line may end after a hyphen, a slash and the like.
BROKEN_WORDS = """() => {
    const broken = [], range = document.createRange();
    for (const cell of document.querySelectorAll("article table:not(.genindextable) :is(td, th)")) {
        const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        for (let text = texts.nextNode(); text; text = texts.nextNode()) {
            if (text.parentElement.closest("mjx-container, script")) continue;
            for (const { 0: word, index } of text.data.matchAll(/\\w{2,}/g)) {
                range.setStart(text, index);
                range.setEnd(text, index + word.length);
                const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
                if (lines.size > 1) broken.push(word);
            }
        }
    }
    return broken;
}"""

PASSED_OVER = """() => [...document.querySelectorAll("a[href], button, summary, input, select, textarea")]
    .filter(e => e.tabIndex < 0 && !e.disabled && e.checkVisibility({visibilityProperty: true}))
    .map(e => e.outerHTML.slice(0, 120))"""


def test_a_page_is_whole_and_open_to_every_reader(visit, axe, address):
    # One visit, changed as a reader changes it: loading each page three times would take most of the time.
    read: Visit = visit(address)
    page = read.page
    page.evaluate(UNFOLD)
    page.evaluate(MERGE_CODE)
    page.evaluate(axe)
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate(RUN_AXE, {}) == []
    assert page.evaluate(PASSED_OVER) == []

    darken(page)
    # In the dark the page is the same but for its colours.
    assert page.evaluate(RUN_AXE, {"runOnly": ["color-contrast", "link-in-text-block"]}) == []

    page.set_viewport_size({"width": PHONE, "height": 844})
    assert page.evaluate(STICKS_OUT) == []
    assert page.evaluate(BROKEN_WORDS) == []
    assert page.evaluate(PASSED_OVER) == []
    assert read.trouble() == []


def test_the_address_of_the_whole_leads_to_the_front_page(visit):
    read: Visit = visit("search.html")
    read.page.goto(read.site)
    read.page.wait_for_url("**/book/index.html")


def test_old_addresses_of_chapters_lead_to_the_new_ones_and_to_the_place_in_them(visit, forwarded):
    read: Visit = visit("search.html")
    for old, new in forwarded.items():
        read.page.goto(f"{read.site}{old}.html#exercises")
        read.page.wait_for_url(f"**/notebooks/{new}#exercises")


def test_a_figure_too_small_to_read_on_a_phone_has_a_larger_view(visit):
    page = visit("notebooks/03_partition.html", width=PHONE).page
    image = page.locator("article .cell_output img:visible").first
    image.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('img.figure-small')")
    small = image.evaluate("(image) => image.clientWidth")
    image.click()
    view = page.locator("dialog.figure-view")
    assert view.locator("img").evaluate("(image) => image.clientWidth") > 1.4 * small
    assert page.evaluate("document.activeElement.textContent") == "Close"
    page.keyboard.press("Escape")
    assert view.count() == 0
    image.locator("xpath=following-sibling::button").click()
    view.get_by_role("button", name="Close").click()
    assert view.count() == 0
