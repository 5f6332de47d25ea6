"""The picture of a load shows each range once: in its file, as wide as its bytes, in its reader's colour."""

from __future__ import annotations

import pytest
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from zero_ref.lab import plots
from zero_ref.lab.plots import Read

NAMES = ["shard-0", "shard-1"]
READS = [Read(1, 512, 1024, 2), Read(0, 0, 2304, 0), Read(1, 0, 256, 0), Read(1, 256, 512, 1)]


def two_files(ax: Axes) -> Axes:
    return plots.file_reads(READS, ax, names=NAMES)


def test_a_range_is_in_the_row_of_its_file_as_wide_as_its_bytes_and_in_its_readers_colour():
    boxes = [box for box in drawn(two_files).patches if isinstance(box, Rectangle)]
    found = [
        Read(round(box.get_y()), round(box.get_x()), round(box.get_x() + box.get_width()), reader)
        for box in boxes
        for reader in range(8)
        if to_hex(box.get_facecolor()).upper() == plots.rank_colour(reader, 8)
    ]
    assert sorted(found) == sorted(READS)


def test_ranges_say_their_reader_and_their_bytes_and_rows_their_file():
    ax = drawn(two_files)
    assert {*NAMES, "rank 0\n2,304", "rank 0\n256", "rank 1\n256", "rank 2\n512"} <= set(written(ax))
    above, below = ax.get_ylim()[::-1]
    assert above < below  # file 0 stands above file 1


def test_what_does_not_fit_is_refused():
    _, ax = plots.figure()
    with pytest.raises(ValueError, match=r"reader=8.* ranks 0 to 7"):
        plots.file_reads([Read(0, 0, 4, 8)], ax, names=NAMES)
    with pytest.raises(ValueError, match="there are 2 names of files"):
        plots.file_reads([Read(2, 0, 4, 0)], ax, names=NAMES)


PICTURES: dict[str, Plot] = {
    "file_reads, two files": two_files,
    "file_reads, narrow": lambda ax: plots.file_reads(
        [Read(file, 7 * n, 7 * n + 7, n % 8) for file in range(8) for n in range(40)],
        ax,
        names=[f"shard-{file}-of-8.bin" for file in range(8)],
    ),
    "file_reads, nothing": lambda ax: plots.file_reads([], ax, names=NAMES),
}
