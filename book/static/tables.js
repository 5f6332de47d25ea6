// A table wider than the page scrolls by itself, so a keyboard has to reach it. The theme sees to code alone.
const watched = new ResizeObserver((entries) => {
    for (const { target } of entries) {
        if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
        else target.removeAttribute("tabindex");
    }
});
document.querySelectorAll(".pst-scrollable-table-container").forEach((table) => watched.observe(table));
