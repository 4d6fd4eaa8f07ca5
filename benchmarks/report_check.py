"""Opens report files in headless Chromium and checks them: axe-core, console, network, width, keyboard; screenshots.

    npm install --prefix DIR axe-core playwright-core
    python benchmarks/report_check.py --modules DIR --chromium /usr/bin/chromium --out shots report.html compare.html

Each file is opened in light, dark, on a phone's width and as print. Prints a line a file and view; exit code 1 where
axe-core finds a violation, the page writes to the console, asks for anything, is wider than its window, or the arrow
keys do not reach the figures of its charts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = r"""
import { createRequire } from "module";
import { readFileSync } from "fs";
const { files, modules, chromium: executablePath, out } = JSON.parse(process.argv[2]);
const require = createRequire(modules + "/");
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core"), "utf8");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const views = [
  { name: "light", colorScheme: "light", width: 1200 },
  { name: "dark", colorScheme: "dark", width: 1200 },
  { name: "phone", colorScheme: "light", width: 390 },
  { name: "print", colorScheme: "dark", width: 760, media: "print" },
];
for (const file of files) {
  for (const { name, colorScheme, width, media } of views) {
    const faults = [];
    // Without the page's policy, so that axe-core may be put into it; the policy itself is checked once more below.
    const page = await browser.newPage({ colorScheme, viewport: { width, height: 900 }, bypassCSP: true });
    page.on("console", (message) => faults.push("console: " + message.text()));
    page.on("pageerror", (error) => faults.push("error: " + error.message));
    page.on("request", (request) => {
      if (!/^(file|data):/.test(request.url())) faults.push("request: " + request.url());
    });
    await page.goto("file://" + file);
    if (media) await page.emulateMedia({ media, colorScheme });
    const wider = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    if (wider > 0) faults.push(`wider than its window by ${wider} pixels`);
    if (out) await page.screenshot({ path: `${out}/${file.split("/").pop()}-${name}.png`, fullPage: true });
    if (!media) faults.push(...(await keyboard(page)));
    await page.evaluate(axe);
    const found = await page.evaluate(() => axe.run(document));
    for (const { id, impact, nodes } of found.violations)
      faults.push(`axe ${id} (${impact}): ${nodes[0].html.slice(0, 120)}`);
    console.log(JSON.stringify({ file, view: name, rules: found.passes.length, faults }));
    await page.close();
  }
  const faults = [];
  const page = await browser.newPage();
  page.on("console", (message) => faults.push("console: " + message.text()));
  await page.goto("file://" + file);
  faults.push(...(await keyboard(page)));
  console.log(JSON.stringify({ file, view: "policy", rules: 0, faults }));
  await page.close();
}
await browser.close();

async function keyboard(page) {
  const faults = [];
  const drawings = await page.$$(".drawing:has([data-tip])");
  for (const drawing of drawings) {
    await drawing.focus();
    await page.keyboard.press("ArrowRight");
    const told = await page.evaluate(() => {
      const tip = document.getElementById("tip");
      return tip.hidden ? "" : tip.textContent;
    });
    if (!told) faults.push("the arrow keys tell nothing in " + (await drawing.getAttribute("aria-label")));
    await page.keyboard.press("Escape");
  }
  return faults;
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--modules", required=True, type=Path, help="folder that holds node_modules")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser's program")
    parser.add_argument("--out", type=Path, help="folder for screenshots")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    request = {
        "files": [str(file.resolve()) for file in options.files],
        "modules": str(options.modules.resolve()),
        "chromium": options.chromium,
        "out": str(options.out.resolve()) if options.out else None,
    }
    command = ["node", "--input-type=module", "-", json.dumps(request)]
    done = subprocess.run(command, input=SCRIPT, text=True, stdout=subprocess.PIPE, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        verdict = "; ".join(line["faults"]) or "holds"
        print(f"{Path(line['file']).name} {line['view']}: {verdict} ({line['rules']} axe rules passed)")
    return 1 if done.returncode or any(line["faults"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
