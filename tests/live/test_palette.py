"""The palette's colours stay apart for readers who see colours differently."""

from itertools import combinations

import pytest

from zero_ref.live.palette import PART_COLOURS, RANK_COLOURS, SERIES_COLOURS
from zero_ref.simulator.recipe import TRAINED

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# IEEE TVCG 15(6), 2009: their matrices for severity 1.0, for linear red, green and blue.
AS_SEEN_WITH = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# sRGB to CIE XYZ, and its white (IEC 61966-2-1, D65).
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def times(matrix, vector):
    return tuple(sum(a * b for a, b in zip(row, vector)) for row in matrix)


def lab(colour: str, matrix) -> tuple[float, float, float]:
    """The colour in CIE L*a*b*, as seen through `matrix`."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    seen = [min(max(c, 0.0), 1.0) for c in times(matrix, linear)]  # a screen shows no more
    ratios = [c / w for c, w in zip(times(TO_XYZ, seen), WHITE)]
    x, y, z = (r ** (1 / 3) if r > (6 / 29) ** 3 else r / (3 * (6 / 29) ** 2) + 4 / 29 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: str, other: str, matrix) -> float:
    """Return CIE76's delta E of two colours. About 2.3 is just noticeable (Mahy et al., 1994)."""
    return sum((a - b) ** 2 for a, b in zip(lab(one, matrix), lab(other, matrix))) ** 0.5


def test_black_and_white_are_a_hundred_apart_for_everyone():
    for matrix in AS_SEEN_WITH.values():
        assert apart("#000000", "#FFFFFF", matrix) == pytest.approx(
            100, abs=0.1
        )  # the matrices have 6 digits


def test_red_and_green_of_one_lightness_meet_without_one_kind_of_cones():
    pair = ("#D55E00", "#5E8A00")
    assert apart(*pair, AS_SEEN_WITH["all cones"]) > 75
    assert apart(*pair, AS_SEEN_WITH["deuteranopia"]) < 20


# The least is 6.4, of the third and the fifth series with protanopia, and 7.1, of ranks 3 and 7 with
# deuteranopia: seen as two colours side by side, but not named from afar. That is why ranks have their number
# and series a marker too. Most pictures have at most four of either, which are much further apart.
@pytest.mark.parametrize("sight", AS_SEEN_WITH)
@pytest.mark.parametrize(
    ("colours", "least"),
    [
        (RANK_COLOURS[:4], 15),
        (RANK_COLOURS, 6),
        (SERIES_COLOURS[:4], 15),
        (SERIES_COLOURS, 6),
        (tuple(PART_COLOURS.values()), 40),
    ],
    ids=["four ranks", "ranks", "four series", "series", "parts"],
)
def test_every_two_colours_stay_apart(colours, least, sight):
    distances = {pair: apart(*pair, AS_SEEN_WITH[sight]) for pair in combinations(colours, 2)}
    nearest = min(distances, key=distances.get)
    assert distances[nearest] >= least, f"{nearest} are {distances[nearest]:.1f} apart with {sight}"


def test_every_strategy_of_the_demo_has_a_colour_of_its_own():
    assert len(set(SERIES_COLOURS)) >= len(TRAINED)
