// A table wider than the page scrolls by itself, so a keyboard has to reach it. The theme sees to code alone.
const watched = new ResizeObserver((entries) => {
    for (const { target } of entries) {
        if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
        else target.removeAttribute("tabindex");
    }
});
document.querySelectorAll(".pst-scrollable-table-container").forEach((table) => watched.observe(table));
// Lines of output wrap. Columns that print has aligned would fall apart, so such an output scrolls instead.
document.querySelectorAll(".cell_output .output:is(.stream, .text_plain)").forEach((output) => {
    const aligned = output.textContent.split("\n").filter((line) => /\S {2,}\S/.test(line));
    output.classList.toggle("in-columns", aligned.length > 1);
});
