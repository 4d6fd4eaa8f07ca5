"""Drives the built-in page in headless Chromium: send, stream, stop, charts, themes, a phone's width, keyboard.

    llmopt serve FOLDER --port 8000 &
    python benchmarks/serve_page.py http://127.0.0.1:8000 --shots FOLDER      # needs playwright and a Chromium

Exits 1 where the page does not do what it should. Look at the screenshots all the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

INK = """(name) => {
  const canvas = document.getElementById(name);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height - 3).data;
  let sum = 0;
  for (let i = 3; i < data.length; i += 4) sum += data[i] > 0;
  return sum;
}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--shots", type=Path, default=Path("."))
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        try:
            converse(browser, arguments.url, arguments.shots)
            phone(browser, arguments.url, arguments.shots)
        finally:
            browser.close()
    print("the page does what it should")
    return 0


def open_page(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    """A page and the list that collects its errors and what it asks of other hosts."""
    page, faults = browser.new_context(**options).new_page(), []
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(url) else faults.append(request.url))
    page.goto(url)
    wait(page, "document.getElementById('state').textContent === 'ready'")
    return page, [fault for fault in faults if not fault.startswith("data:")]


def wait(page: Any, expression: str, seconds: float = 120) -> None:
    """Until a JavaScript expression holds. (Playwright's own waiting needs eval, which the page's policy forbids.)"""
    for _ in range(int(seconds * 20)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {expression}")


def converse(browser: Any, url: str, shots: Path) -> None:
    page, faults = open_page(browser, url, viewport={"width": 1200, "height": 800}, color_scheme="light")
    assert page.evaluate("document.activeElement.id") == "input"
    page.keyboard.type("Write a short story about a river and a bridge.")
    page.keyboard.press("Enter")
    answer = page.locator(".message.assistant").last
    wait(page, "document.querySelector('.message.assistant span').textContent.length > 20")
    early = answer.locator("span").first.text_content()
    page.wait_for_timeout(400)
    later = answer.locator("span").first.text_content()
    assert later.startswith(early), "the text grows"
    wait(page, "document.getElementById('stop').disabled")
    note = answer.locator(".note").text_content()
    assert "first text after" in note and "tokens" in note, note
    page.fill("#input", "Now tell it again, much longer, with every detail you can think of.")
    page.keyboard.press("Enter")
    wait(page, "document.querySelectorAll('.message.assistant span')[2].textContent.length > 20")
    page.screenshot(path=shots / "page-light.png")
    page.keyboard.press("Escape")
    wait(page, "document.getElementById('stop').disabled")
    assert "stopped" in page.locator(".message.assistant .note").last.text_content()
    page.wait_for_timeout(2500)
    for name in ("throughput", "requests", "cache"):
        assert page.evaluate(INK, name) > 0, f"the chart {name} is empty"
    assert "0 running" in page.locator("#requests-now").text_content(), "stopping frees the engine"
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#settings-button")
    page.screenshot(path=shots / "page-dark.png")
    page.fill("#max-tokens", "-5")
    page.fill("#input", "wrong")
    page.press("#input", "Enter")
    page.wait_for_selector(".message.fault")
    assert "max_tokens" in page.locator(".message.fault").text_content()
    page.click("#clear")
    assert page.locator(".message").count() == 0
    unexpected = [fault for fault in faults if "400" not in fault]
    assert not unexpected, unexpected


def phone(browser: Any, url: str, shots: Path) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "color_scheme": "dark"}
    page, faults = open_page(browser, url, is_mobile=True, has_touch=True, **options)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.fill("#input", "Name three rivers.")
    page.tap("#send")
    wait(page, "document.querySelectorAll('.message.assistant span').length > 0")
    wait(page, "document.getElementById('stop').disabled")
    page.wait_for_timeout(2000)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360, f"{wide} pixels wide"
    page.screenshot(path=shots / "page-phone.png", full_page=True)
    assert not faults, faults


if __name__ == "__main__":
    sys.exit(main())
