"""Vega-Lite specifications drawn as SVG, and cleaned: no script, no address, no style of its own.

Colours may be CSS variables such as `var(--c1)`; the page defines them for light, dark and paper. A mark's
`description` becomes the attribute `data-tip`, which the page's script shows; screen readers get the drawing's
`aria-label` and the table behind it.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from functools import cache
from importlib.util import find_spec
from typing import Any

from ...optimizer.errors import MissingDependency, RunError
from .page import clean

NAMESPACE = "http://www.w3.org/2000/svg"
ELEMENTS = {"svg", "g", "path", "text", "tspan", "line", "rect", "circle", "defs", "clipPath", "title"}
ATTRIBUTES = {
    "width", "height", "viewBox", "transform", "d", "fill", "stroke", "stroke-width", "stroke-dasharray", "opacity",
    "stroke-opacity", "fill-opacity", "stroke-linecap", "stroke-linejoin", "stroke-miterlimit", "text-anchor", "x", "y",
    "x1", "x2", "y1", "y2", "r", "cx", "cy", "dx", "dy", "rx", "ry", "font-size", "font-weight", "font-style",
    "clip-path", "id", "data-tip",
}  # fmt: skip
LOCAL = re.compile(r"(?:(?!url\()[^<>&\\])*|url\(['\"]?#[\w-]+['\"]?\)", re.IGNORECASE | re.DOTALL)
"""Values that name nothing outside the drawing."""
LONG = re.compile(r"-?\d+\.\d{3,}")

CONFIG: dict[str, Any] = {
    "background": None,
    "font": "DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--soft)", "titleColor": "var(--soft)", "gridColor": "var(--grid)",
        "tickColor": "var(--line)", "domainColor": "var(--line)", "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal", "labelLimit": 320, "labelPadding": 5,
    },
    "legend": {"labelColor": "var(--ink)", "titleColor": "var(--soft)", "labelFontSize": 11, "titleFontSize": 11,
               "titleFontWeight": "normal", "labelLimit": 220, "symbolStrokeWidth": 2},
    "text": {"color": "var(--ink)", "fontSize": 11},
    "rule": {"color": "var(--soft)"},
    "header": {"labelColor": "var(--ink)", "titleColor": "var(--soft)"},
}  # fmt: skip


def available() -> bool:
    """Whether the library that draws is installed."""
    return find_spec("vl_convert") is not None


def draw(spec: dict[str, Any], label: str) -> str:
    """The SVG of a Vega-Lite specification, with `label` for those who do not see it.

    Raises MissingDependency where vl-convert is absent, RunError where it cannot draw the specification.
    """
    if not available():
        raise MissingDependency("vl-convert-python", "report", "a report's charts")
    import vl_convert

    whole = {"$schema": f"https://vega.github.io/schema/vega-lite/{_version()}.json", **spec, "config": CONFIG}
    try:
        svg = vl_convert.vegalite_to_svg(json.dumps(clean(whole)), vl_version=_version(), allowed_base_urls=[])
    except ValueError as error:
        raise RunError(f"a chart cannot be drawn: {str(error).strip().splitlines()[0]}", label) from error
    return cleaned(svg, label)


@cache
def _version() -> str:
    """The newest Vega-Lite of the major version 5 or later that the library has."""
    import vl_convert

    return "v" + max(vl_convert.get_vegalite_versions(), key=lambda name: [int(part) for part in name.split(".")])


def cleaned(svg: str, label: str) -> str:
    """The drawing without anything but shapes and texts. Raises RunError where it is not well-formed."""
    try:
        root = ET.fromstring(clean(svg))
    except ET.ParseError as error:
        raise RunError(f"a chart cannot be drawn: {error}", label) from error
    _strip(root)
    root.set("role", "img")
    root.set("aria-label", clean(label))
    return ET.tostring(root, encoding="unicode")


def _strip(element: ET.Element) -> None:
    element.tag = element.tag.rpartition("}")[2]
    tip = element.get("aria-label")
    if tip and element.get("role") == "graphics-symbol" and element.get("class") is None:  # axes and legends have one
        element.set("data-tip", tip)
    for name, value in list(element.attrib.items()):
        if name == "data-tip":
            continue
        if name not in ATTRIBUTES or not LOCAL.fullmatch(value):
            del element.attrib[name]
        else:
            element.set(name, LONG.sub(_rounded, value))
    for child in list(element):
        if _drawn(child):
            _strip(child)
        else:
            element.remove(child)


def _drawn(child: ET.Element) -> bool:
    """Whether an element is one of those allowed, and shows."""
    if not isinstance(child.tag, str) or child.tag.rpartition("}")[2] not in ELEMENTS:
        return False
    return child.get("display") != "none" and child.get("d") != ""


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
