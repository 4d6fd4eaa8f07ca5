"""The chart of memory over a run, as a Vega-Lite specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .charts import SERIES, TIP, WIDTH, Spec
from .values import size


def memory_timeline(timeline: dict[str, Any], series: dict[str, list[float]]) -> Spec:
    """Memory over the run, with its stages as bands. timeline: see the manifest; series: name → bytes a sample."""
    times = timeline["times"]
    end = max([times[-1], *(stage["end"] for stage in timeline["stages"])]) or 1.0
    bands = [_band(stage, place, timeline, series, end) for place, stage in enumerate(timeline["stages"])]
    lines = [
        {"time": time, "series": name, "mib": value / 2**20}
        for name, values in series.items()
        for time, value in zip(times, values)
    ]
    scale = {"domain": [0, end], "nice": False}
    x = {"field": "start", "type": "quantitative", "scale": scale}
    shade = {"field": "odd", "type": "nominal", "legend": None,
             "scale": {"domain": [0, 1], "range": ["var(--band)", "var(--surface)"]}}  # fmt: skip
    colour = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": list(series), "range": SERIES[: len(series)]},
        "legend": {"orient": "bottom", "title": None, "symbolType": "stroke", "symbolSize": 300},
    }
    time_axis = {"title": "seconds since the run began", "grid": False}
    most = max((row["mib"] for row in lines), default=1.0)
    y_scale = {"domain": [0, most * 1.3], "nice": False}
    labels = [
        {
            "transform": [{"filter": f"datum.fits == '{fits}'"}],
            "mark": {"type": "text", "y": 12 if fits == "flat" else 6, "angle": 0 if fits == "flat" else 270,
                     "align": "center" if fits == "flat" else "right", "baseline": "middle", "aria": False,
                     "color": "var(--soft)", "fontSize": 10},
            "encoding": {"x": {"field": "middle", "type": "quantitative", "scale": scale}, "text": {"field": "name"}},
        }
        for fits in ("flat", "upright")
        if any(band["fits"] == fits for band in bands)
    ]  # fmt: skip
    rect = {
        "data": {"values": bands},
        "layer": [
            {
                "mark": {"type": "rect", "stroke": "var(--grid)", "strokeWidth": 1},
                "encoding": {"x": {**x, "axis": time_axis}, "x2": {"field": "end"}, "color": shade, "description": TIP},
            },
            *labels,
        ],
    }
    line = {
        "data": {"values": lines},
        "mark": {"type": "line", "strokeWidth": 1.8, "aria": False},
        "encoding": {
            "x": {"field": "time", "type": "quantitative", "scale": scale},
            "y": {"field": "mib", "type": "quantitative", "scale": y_scale, "axis": {"title": "MiB", "tickCount": 6}},
            "color": colour,
        },
    }
    layers = ([rect] if bands else []) + [line]
    return {"width": WIDTH, "height": 260, "layer": layers, "resolve": {"scale": {"color": "independent"}}}


def _band(
    stage: dict[str, Any], place: int, timeline: dict[str, Any], series: dict[str, list[float]], end: float
) -> dict[str, Any]:
    width = (stage["end"] - stage["start"]) / end * WIDTH
    name = str(stage["name"])[:40]
    fits = "flat" if width > 6.5 * len(name) + 6 else "upright" if width > 12 and len(name) < 22 else "no"
    peaks = [
        f"{title}: {size(peak)} at most"
        for title, values in series.items()
        if (peak := stage_peak(stage, timeline["times"], values)) is not None
    ]
    return {
        "name": name,
        "start": stage["start"],
        "end": stage["end"],
        "middle": (stage["start"] + stage["end"]) / 2,
        "odd": place % 2,
        "fits": fits,
        "tip": "\n".join([f"{name}, {stage['end'] - stage['start']:.1f} s", *peaks]),
    }


def stage_peak(stage: dict[str, Any], times: Sequence[float], values: Sequence[float]) -> float | None:
    """Most bytes of the samples taken during a stage; None where there are none."""
    inside = [value for time, value in zip(times, values) if stage["start"] <= time <= stage["end"]]
    return max(inside) if inside else None
