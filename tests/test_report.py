"""Reports: what the page says, that it loads nothing, that texts of models stay texts, that it stays small."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import llmopt
import pytest
from llmopt.evaluation.report import draw_report, write_report
from llmopt.evaluation.report.examples import END, pairs
from llmopt.evaluation.report.layers import kinds, modules, places
from llmopt.evaluation.report.page import clean
from llmopt.evaluation.report.svg import cleaned
from llmopt.evaluation.report.values import percent, ratio, seconds, short, size
from llmopt.optimizer.errors import MissingDependency, RunError, UsageError
from llmopt.tests.manifests import KINDS, OTHER, PROMPT, SAME, layer_lines, manifest

drawing = pytest.mark.skipif(find_spec("vl_convert") is None, reason="the extra report is not installed")
VOID = {"meta", "link", "br", "img", "input", "hr", "base", "embed", "source"}
SECTIONS = ("Before and after", "Quality", "Layers", "Examples", "The run", "What fell back", "Recipe", "Provenance")


class Reader(HTMLParser):
    """Elements, their attributes and the text of a page; asserts that elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.marks: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside == "mark":
            self.marks.append(data)
        if inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def html() -> str:
    return draw_report("artifact", manifest())


@pytest.fixture(scope="module")
def page(html) -> Reader:
    return Reader(html)


@drawing
def test_every_part_is_there(page):
    headings = [text for text in page.words if text.strip() in SECTIONS]
    assert [text.strip() for text in headings][-len(SECTIONS) :] == list(SECTIONS)
    for said in ("1 of 2 gates missed: min_top1_agreement", "95.4 MiB", "from 190.7 MiB", "0.50×", "+10.00%", "1.50×",
                 "150 tok/s", "0.9×", "90.0%", "seed 7", "flash_attn was passed over", "no compiled kernel",
                 "bits: 4", "apache-2.0", "a" * 64, "2.13.0", "14 linear layers"):  # fmt: skip
        assert said.replace("0.9×", "0.90×") in page.text, said
    charts = [svg["aria-label"] for svg in page.all("svg")]
    assert len(charts) == 5 and all(len(label or "") > 40 for label in charts)
    assert "not recorded" not in page.text


@drawing
def test_the_page_loads_nothing(html, page):
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "http" not in policy
    for tag in ("img", "iframe", "object", "embed", "source", "video", "use", "image"):
        assert not page.all(tag)
    assert all((a["href"] or "").startswith("#") for a in page.all("a"))
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", re.sub(r"<script>.*?</script>", "", html, flags=re.S))


@drawing
def test_the_scripts_hash_is_the_policys(html, page):
    import base64
    import hashlib

    assert len(page.scripts) == 1 and len(page.all("script")) == 1
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html


@drawing
def test_structure_for_assistive_technology(page):
    assert len(page.all("h1")) == 1 and len(page.all("main")) == 1 and page.all("header") and page.all("footer")
    assert page.all("html")[0]["lang"] == "en"
    identities = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(identities) == len(set(identities))
    for section in page.all("section"):
        assert section["aria-labelledby"] in identities
    assert len(page.all("table")) == len(page.all("caption"))
    assert all(th.get("scope") in ("col", "row") for th in page.all("th"))
    for scroll in (div for div in page.all("div") if "scroll" in (div.get("class") or "")):
        assert scroll["tabindex"] == "0" and scroll["aria-label"]
    assert all(svg["role"] == "img" for svg in page.all("svg"))


@drawing
def test_charts_take_their_colours_from_the_page(html):
    style = html[html.index("<style>") : html.index("</style>")]
    used = set(re.findall(r"var\((--[\w]+)\)", html))
    defined = set(re.findall(r"(--[\w]+):", style))
    assert used <= defined
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.S):
        assert not set(re.findall(r'(?:fill|stroke)="([^"]*)"', svg)) - {f"var({name})" for name in defined} - {"none"}


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&lt;{{ 7*7 }}\x00\x1b\ud800\u202e\uffff]]>"


@drawing
def test_hostile_texts_stay_texts():
    data = manifest()
    data["source"] = {**data["source"], "id": HOSTILE, "license": HOSTILE}
    data["recipe"] = {**data["recipe"], "name": HOSTILE, "description": HOSTILE}
    data["notes"] = [{"stage": HOSTILE, "kind": "fallback", "message": HOSTILE}]
    data["gates"][0]["name"] = HOSTILE
    data["environment"] = {HOSTILE: HOSTILE}
    data["files"] = {HOSTILE: HOSTILE}
    data["timeline"]["stages"][1]["name"] = HOSTILE
    line = data["passes"][0]["layers"][3]
    line["name"] = f"model.layers.0.{HOSTILE}"
    for samples in (data["certificate"]["samples"], data["certificate"]["source_samples"]):
        samples[0].update(prompt=HOSTILE, text=HOSTILE + samples[0]["text"], token_ends=None)
    html = draw_report("artifact", data)
    html.encode("utf-8")
    page = Reader(html)
    assert len(page.all("script")) == 1 and "alert" not in page.scripts[0]
    assert not page.all("img") and "{{ 7*7 }}" in page.text
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert not re.search("[\x00\x1b\ud800\uffff]", html)


@pytest.mark.parametrize(
    "svg",
    [
        '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script><path d="M0,0"/></svg>',
        '<svg xmlns="http://www.w3.org/2000/svg"><foreignObject><b>x</b></foreignObject><path d="M0,0"/></svg>',
        '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><path d="M0,0" onclick="alert(1)"/></svg>',
        '<svg xmlns="http://www.w3.org/2000/svg"><a href="http://example.org"><path/></a><path d="M0,0"/></svg>',
        '<svg xmlns="http://www.w3.org/2000/svg"><path d="M0,0" fill="url(http://example.org)" style="x"/></svg>',
    ],
)
def test_drawings_are_cleaned(svg):
    assert cleaned(svg, "a label") == '<svg role="img" aria-label="a label"><path d="M0,0" /></svg>'


def test_a_broken_drawing_is_an_error():
    with pytest.raises(RunError, match="cannot be drawn"):
        cleaned("<svg><path></svg>", "x")


@drawing
def test_what_an_old_manifest_lacks_is_said():
    data = manifest()
    del data["timeline"]
    for key in ("kl_histogram", "source_samples"):
        del data["certificate"][key]
    for part in ("before", "after"):
        for key in ("decode_tokens_per_second", "prefill_tokens_per_second"):
            del data["measured"][part][key]
    page = Reader(draw_report("artifact", data))
    for what in ("Memory over the run", "The distribution of the divergence", "The source's continuations",
                 "decode speed, prefill speed"):  # fmt: skip
        assert f"{what}: not recorded." in page.text
    assert len(page.all("svg")) == 3 and SAME.strip() in page.text


@drawing
def test_a_manifest_of_nearly_nothing_draws():
    page = Reader(draw_report("artifact", {"source": {"id": "x"}, "measured": {}, "certificate": {}}))
    assert "No gates were set" in page.text and "Nothing fell back." in page.text
    assert "No pass recorded a change to single layers." in page.text


@drawing
def test_200_layers_stay_under_3_megabytes():
    data = manifest(layers=200)
    html = draw_report("artifact", data)
    assert len(html.encode()) < 3 * 2**20
    page = Reader(html)
    assert len(page.all("svg")) == 5
    tips = [attributes["data-tip"] for _, attributes in page.elements if attributes.get("data-tip")]
    for layer in (0, 77, 199):
        assert sum(tip.startswith(f"layer {layer}, ") for tip in tips) == 2 * len(KINDS)
    assert "All 1,400 modules" in page.text and "model.layers.199.mlp.down_proj" in page.text
    assert "left out" not in page.text


@drawing
def test_thousands_of_experts_are_folded_and_what_is_left_out_is_said():
    lines = [
        {"name": f"model.layers.{layer}.mlp.experts.{expert}.up_proj", "bits": 4, "error": 1e-3}
        for layer in range(20)
        for expert in range(200)
    ]
    data = manifest(passes=[{**manifest()["passes"][0], "layers": lines}])
    page = Reader(draw_report("artifact", data))
    assert "1,000 more rows are left out" in page.text and "4,000 modules of 4 bits" in page.text


def test_layers_are_placed():
    expert = "model.layers.1.mlp.experts.{}.up_proj"
    lines = [*layer_lines(2), {"name": "lm_head", "bits": 8}, {"name": expert.format(3), "bits": 2},
             {"name": expert.format(4), "bits": 4, "error": 0.5}]  # fmt: skip
    found = modules([{"name": "quantize", "layers": lines}, {"name": "fuse", "layers": [{"name": "lm_head"}]}])
    assert [module.name for module in found if module.layer is None] == ["lm_head"]
    assert next(module for module in found if module.name == "lm_head").bits == 8  # the later record says no bits
    assert kinds(found)[:4] == list(KINDS[:4]) and "mlp.experts.up_proj" in kinds(found)
    experts = next(place for place in places(found) if place.kind == "mlp.experts.up_proj")
    assert (experts.layer, experts.modules, experts.bits, experts.error) == (1, 2, 3.0, 0.5)


def side(text, ids, ends=None):
    return {"prompt": "p", "text": text, "token_ids": ids, **({"token_ends": ends} if ends else {})}


def marked(left, right):
    [pair] = pairs([left], [right], ("source", "artifact")).pairs
    return pair.verdict, pair.left.parts[1], pair.right.parts[1]


def test_the_first_differing_token_is_marked():
    one = side("a cat sat", [1, 2, 3], [1, 5, 9])
    assert marked(one, side("a dog sat", [1, 9, 3], [1, 5, 9])) == (
        "The first 1 tokens are the same; token 2 differs.",
        " cat",
        " dog",
    )
    assert marked(one, dict(one)) == ("All 3 tokens are the same.", "", "")
    assert marked(side("a cat", [1, 2], [1, 5]), one)[1:] == (END, " sat")
    assert marked(side("a\n\nb", [1, 4, 5], [1, 3, 4]), side("a b", [1, 6, 5], [1, 2, 3]))[1:] == ("⏎\n⏎\n", "␣")
    assert marked(side("cat", [2], [3]), side("dog", [3], [3])) == ("The first token differs.", "cat", "dog")


def test_without_token_ends_the_first_differing_word_is_marked():
    assert marked(side("a big cat", [1, 2, 3]), side("a big dog", [1, 2, 4]))[1:] == ("cat", "dog")
    assert marked({"prompt": "p", "text": "same"}, {"prompt": "p", "text": "same"})[1:] == ("", "")


@drawing
def test_the_page_marks_the_examples(page):
    assert [mark for mark in page.marks] == [OTHER[3:9], SAME[3:10]]
    assert f"“{PROMPT}”" in page.text


def test_values():
    assert [size(v) for v in (10, 2048, 5 * 2**20, 3 * 2**30, None)] == [
        "10 bytes",
        "2.0 KiB",
        "5.0 MiB",
        "3.00 GiB",
        "–",
    ]
    assert [short(v) for v in (0.08, 0.123456, 1234.5678, 12, 0.0, 1.5e-7, float("nan"))] == [
        "0.08", "0.1235", "1,235", "12", "0", "1.500e-07", "–"]  # fmt: skip
    assert (percent(0.1234), percent(None), percent(-0.5, 0, signed=True)) == ("12.3%", "–", "-50%")
    assert ratio(1, 0) is None and ratio(None, 1) is None and ratio(3, 2) == 1.5
    assert [seconds(v) for v in (3.21, 125, 7300, None)] == ["3.2 s", "2 min 05 s", "2 h 01 min", "–"]


def test_clean_replaces_what_a_page_may_not_hold():
    assert clean({"a\x00": ["b\ud800c", 1, "é😀\n"]}) == {"a\ufffd": ["b\ufffdc", 1, "é😀\n"]}


@drawing
def test_reports_are_written_whole(tmp_path):
    path = tmp_path / "new" / "report.html"
    assert write_report("artifact", manifest(), path) == path
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    with pytest.raises(UsageError, match="is a folder"):
        write_report("artifact", manifest(), tmp_path)


@drawing
def test_unknown_kinds_are_refused():
    with pytest.raises(UsageError, match="no report of kind 'poem'"):
        draw_report("poem", {})


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("llmopt.evaluation.report.write.available", lambda: False)
    with pytest.raises(MissingDependency, match=r"llmopt\[report\]"):
        draw_report("artifact", manifest())


def themes() -> list[dict[str, str]]:
    """The page's colours by name, in light and in dark."""
    style = (Path(llmopt.__file__).parent / "evaluation" / "report" / "style.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    )
    return [light, {**light, **dark}]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours `#rrggbb` (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_colours_are_readable(theme):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    texts = [
        (ink, ground) for ink in ("ink", "soft", "accent", "good", "bad", "warn") for ground in ("page", "surface")
    ]
    texts += [("soft", "band"), ("mark-ink", "mark"), *((f"t{n}", f"s{n}") for n in range(1, 8))]
    shapes = [(f"c{n}", ground) for n in range(1, 9) for ground in ("surface", "band")]
    too_weak = [pair for pair in texts if contrast(theme[pair[0]], theme[pair[1]]) < 4.5]
    too_weak += [pair for pair in shapes if contrast(theme[pair[0]], theme[pair[1]]) < 3]
    assert not too_weak
