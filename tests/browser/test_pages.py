"""Every page of the book, opened in Chromium: it reads offline, for every reader, on every screen."""

import pytest
from reader import PHONE, Visit

pytestmark = pytest.mark.browser

# All folds open, and at once: a colour on its way to another is neither.
UNFOLD = """() => {
    const still = document.createElement("style");
    still.textContent = "*, ::before, ::after { animation: none !important; transition: none !important; }";
    document.head.append(still);
    document.querySelectorAll("details").forEach(fold => { fold.open = true; });
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

PASSED_OVER = """() => [...document.querySelectorAll("a[href], button, summary, input, select, textarea")]
    .filter(e => e.tabIndex < 0 && !e.disabled && e.checkVisibility({visibilityProperty: true}))
    .map(e => e.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_without_trouble_and_axe_finds_nothing_serious(visit, axe, address, scheme):
    read: Visit = visit(address, dark=scheme == "dark")
    read.page.evaluate(UNFOLD)
    assert read.page.evaluate("document.documentElement.dataset.theme") == scheme
    assert read.trouble() == []
    read.page.evaluate(axe)
    # In the dark the page is the same but for its colours.
    options = {"runOnly": ["color-contrast", "link-in-text-block"]} if scheme == "dark" else {}
    assert read.page.evaluate(RUN_AXE, options) == []


def test_it_does_not_scroll_sideways_on_a_phone_and_a_keyboard_reaches_everything(visit, address):
    read: Visit = visit(address, width=PHONE, height=844)
    read.page.evaluate(UNFOLD)
    assert read.page.evaluate(STICKS_OUT) == []
    assert read.page.evaluate(PASSED_OVER) == []
    assert read.trouble() == []


def test_the_address_of_the_whole_leads_to_the_front_page(visit):
    read: Visit = visit("")
    read.page.wait_for_url("**/book/index.html")
