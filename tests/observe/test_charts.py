"""Charts: round ticks, exact positions, gaps, nothing but SVG."""

import re
import xml.etree.ElementTree as ET

import pytest

from hocket.observe.charts import MAX_POINTS, Scale, legend, line_chart, number, stacked_bars, thin, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 0.9, [0.0, 0.5, 1.0]),
        (0.0, 13.0, [0.0, 5.0, 10.0, 15.0]),
        (-3.0, 4.0, [-4.0, -2.0, 0.0, 2.0, 4.0]),
        (0.0, 0.0, [0.0, 0.5]),
        (0.0, 3e-6, [0.0, 1e-6, 2e-6, 3e-6]),
    ],
)
def test_ticks_are_round_and_enclose_the_data(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (2e-6, "2e-6"), (1.5e-4, "1.5e-4"), (123456.0, "1.2e5"), (1e-12, "1e-12")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_scale_maps_ends_to_ends() -> None:
    scale = Scale(10.0, 20.0, 100.0, 0.0)
    assert (scale(10.0), scale(15.0), scale(20.0)) == (100.0, 50.0, 0.0)


def test_long_runs_are_thinned_to_means() -> None:
    series = [(float(step), float(step)) for step in range(1, 2 * MAX_POINTS + 1)]
    thinned = thin(series)
    assert len(thinned) == MAX_POINTS
    assert thinned[0] == (2.0, 1.5)
    assert thinned[-1] == (480.0, 479.5)


def test_thinning_leaves_out_what_is_missing() -> None:
    series = [(float(step), None if step % 2 else 4.0) for step in range(2 * MAX_POINTS)]
    assert {value for _, value in thin(series)} == {4.0}
    assert {value for _, value in thin([(step, None) for step, _ in series])} == {None}


def test_a_missing_value_breaks_the_line() -> None:
    chart = ET.fromstring(line_chart({"loss": [(1, 0.0), (2, 1.0), (3, None), (4, 1.0), (5, 0.5)]}))
    path = chart.find("path")
    assert path is not None
    assert re.findall("[ML]", path.attrib["d"]) == ["M", "L", "M", "L"]


def test_points_lie_where_the_axes_say() -> None:
    chart = ET.fromstring(line_chart({"accuracy": [(0, 0.0), (10, 1.0)]}, bounds=(0.0, 1.0)))
    path = chart.find("path")
    assert path is not None
    # y runs from 176 (bottom) to 26 (top), x from 46 to 370
    assert path.attrib["d"] == "M46.0,176.0 L370.0,26.0"


def test_the_pointer_shows_every_value_of_a_step() -> None:
    chart = line_chart({"low": [(1, 0.1), (2, 0.2)], "high": [(1, 0.3), (2, None)]})
    assert "step 1: low 0.1 · high 0.3<" in chart
    assert "step 2: low 0.2<" in chart


def test_bars_lie_on_each_other_and_fill_the_axis() -> None:
    chart = ET.fromstring(stacked_bars({"generate": [(1, 1.0), (2, 2.0)], "train": [(1, 3.0), (2, 2.0)]}))
    bars = [{k: float(v) for k, v in bar.attrib.items() if k != "class"} for bar in chart.findall("rect")]
    # four seconds are 150 pixels: 37.5 for one
    assert [bar["height"] for bar in bars] == pytest.approx([37.5, 75.0, 112.5, 75.0], abs=0.06)
    assert bars[2]["y"] + bars[2]["height"] == pytest.approx(bars[0]["y"], abs=0.11)


@pytest.mark.parametrize(
    "series", [[(1, 0.5)], [(0, 0.0), (1, 0.0)], [(1, None), (2, 3.0)], [(5, -1e9), (6, 1e9)], [(1, 1e-300)]]
)
def test_odd_data_still_makes_a_chart(series: list[tuple[float, float | None]]) -> None:
    for chart in (line_chart({"x": series}), stacked_bars({"x": [(step, abs(y or 0.1)) for step, y in series]})):
        assert ET.fromstring(chart).tag == "svg"
        assert "nan" not in chart


def test_names_are_escaped() -> None:
    assert "<b>" not in legend(["<b>"]) + line_chart({"<b>": [(1, 1.0)], "c": [(1, 1.0)]})
