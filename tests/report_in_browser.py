#!/usr/bin/env python3
"""Opens the page of a report in headless Chromium and checks what only a browser can tell.

    cargo run --release -- run sla_r4 --out /tmp/report
    tests/report_in_browser.py /tmp/report --screenshots /tmp/pictures

Checked: nothing is logged as an error and nothing is loaded; tables sort and are copied; shapes and cells say more when pointed at; all of that
works from the keyboard; the page is no wider than a phone, and no table wider than a sheet of paper. With `--screenshots` pictures of the page on a
desktop (light and dark), on a phone and printed are written.

Needs Python 3.10 and a Chromium: `CHROMIUM` names it, or one of the usual names is on the path. Exit code 0: all is well, 1: a check failed, 2: no
browser or no page.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
DESKTOP, PHONE = (1280, 900), (390, 844)
# Width of A4 on its side at 96 pixels per inch, less margins of 14 mm.
PAPER = 1016


class Browser:
    """A headless browser, spoken to through a pair of pipes (DevTools protocol)."""

    def __init__(self, program, profile):
        to_browser, self.ours_out = os.pipe()
        self.ours_in, from_browser = os.pipe()

        def connect():
            # The browser reads commands from descriptor 3 and answers on 4. Copies first: either number may be in use.
            read, write = os.dup(to_browser), os.dup(from_browser)
            os.dup2(read, 3)
            os.dup2(write, 4)

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            [program, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=connect,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number = 0
        self.rest = b""
        self.events = []
        self.session = None

    def message(self):
        while b"\0" not in self.rest:
            part = os.read(self.ours_in, 1 << 16)
            if not part:
                raise RuntimeError("the browser ended")
            self.rest += part
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.ours_out, json.dumps(request).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def evaluate(self, expression):
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "exception"))
        return answer["result"].get("value")

    def key(self, key, code=None, number=0, text=""):
        for kind in ["keyDown", "keyUp"]:
            sent = text if kind == "keyDown" else ""
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code or key, windowsVirtualKeyCode=number, text=sent
            )

    def point(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, x, y):
        for kind in ["mousePressed", "mouseReleased"]:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width, height, mobile=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )

    def media(self, kind="", scheme="light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def picture(self, path):
        whole = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": whole["width"], "height": whole["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
        except (RuntimeError, OSError):
            pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Checks:
    def __init__(self):
        self.failed = []
        self.done = 0

    def that(self, holds, what):
        self.done += 1
        print(("ok      " if holds else "FAILED  ") + what)
        if not holds:
            self.failed.append(what)


ROWS = "Array.from(document.querySelector('table.sort').tBodies[0].rows, (row) => row.textContent)"
TIP = "(() => { const tip = document.querySelector('.tip'); return tip.hidden ? null : tip.textContent; })()"


def middle_of(browser, element):
    """Middle of an element, an expression, after it was scrolled into view."""
    return browser.evaluate(
        f"(() => {{ const element = {element}; element.scrollIntoView({{ block: 'center' }});"
        " const box = element.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )


def sorting(browser, checks):
    before = browser.evaluate(ROWS)
    head = "document.querySelector('table.sort thead th.n button')"
    column = browser.evaluate(f"{head}.closest('th').cellIndex")
    values = (
        "Array.from(document.querySelector('table.sort').tBodies[0].rows,"
        f" (row) => Number(row.cells[{column}].dataset.v))"
    )
    order = f"{head}.closest('th').getAttribute('aria-sort')"
    browser.press(*middle_of(browser, head))
    up = browser.evaluate(values)
    checks.that(
        browser.evaluate(order) == "ascending" and up == sorted(up), "a press on a header sorts upwards by number"
    )
    # The button has the focus now; the keyboard does the same.
    browser.key("Enter", number=13, text="\r")
    down = browser.evaluate(values)
    checks.that(
        browser.evaluate(order) == "descending" and down == sorted(down, reverse=True), "the enter key sorts downwards"
    )
    browser.key(" ", code="Space", number=32, text=" ")
    checks.that(
        browser.evaluate(order) == "none" and browser.evaluate(ROWS) == before, "the space bar gives the old order back"
    )


def copying(browser, checks):
    browser.session, session = None, browser.session
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.session = session
    browser.call("Page.bringToFront")
    browser.press(*middle_of(browser, "document.querySelector('.tools button')"))
    time.sleep(0.3)
    text = browser.evaluate("navigator.clipboard.readText()")
    cells = browser.evaluate(
        "Array.from(document.querySelector('table').rows, (row) => Array.from(row.cells,"
        " (cell) => cell.textContent.trim().replace(/\\s+/g, ' ')))"
    )
    copied = [line.split("\t") for line in text.rstrip("\n").split("\n")]
    checks.that(copied == cells, f"a table is copied: {len(cells)} rows of {len(cells[0])} cells")
    said = browser.evaluate("document.querySelector('.tools [role=status]').textContent")
    checks.that(said == "copied", "the page says so")


def pointing(browser, checks):
    for section, what in [("bars", "bar"), ("roofline", "marker"), ("timeline", "kernel")]:
        # Those of the wide pictures; the narrow ones are hidden on a desktop.
        hits = (
            f"Array.from(document.querySelectorAll('#{section} .hit')).filter((hit) => hit.getBoundingClientRect().width > 3)"
        )
        count = browser.evaluate(f"{hits}.length")
        browser.point(*middle_of(browser, f"{hits}[0]"))
        tip = browser.evaluate(TIP)
        checks.that(bool(count and tip and "bound by" in tip), f"{what}s say more when pointed at ({count} of them)")
        browser.point(1, 1)
    cell = "document.querySelector('#bounds tbody td .bound').closest('td')"
    browser.point(*middle_of(browser, cell))
    checks.that("bound by" in (browser.evaluate(TIP) or ""), "cells say more when pointed at")
    browser.point(1, 1)
    checks.that(browser.evaluate(TIP) is None, "and are silent when left")


def keyboard(browser, checks):
    browser.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    reached = set()
    focus = (
        "(() => { const a = document.activeElement;"
        " return a.classList.contains('hit') ? 'shape' : a.classList.contains('table') ? 'table'"
        " : a.closest('th') ? 'header' : a.closest('.tools') ? 'copy' : a.closest('nav') ? 'link' : a.tagName; })()"
    )
    for _ in range(400):
        browser.key("Tab", number=9)
        reached.add(browser.evaluate(focus))
        if reached >= {"shape", "table", "header", "copy", "link"}:
            break
    checks.that(
        reached >= {"shape", "table", "header", "copy", "link"},
        "the tab key reaches links, headers, copy buttons, tables and pictures",
    )
    for _ in range(400):
        if browser.evaluate(focus) == "shape":
            break
        browser.key("Tab", number=9)
    first = browser.evaluate(TIP)
    browser.key("ArrowRight", number=39)
    second = browser.evaluate(TIP)
    checks.that(
        bool(first and second) and first != second and browser.evaluate(focus) == "shape",
        "arrow keys go from shape to shape",
    )
    browser.key("Escape", number=27)
    checks.that(browser.evaluate(TIP) is None, "the escape key silences them")
    nameless = browser.evaluate(
        "Array.from(document.querySelectorAll('button, a[href], [tabindex], svg')).filter((e) =>"
        " !(e.getAttribute('aria-label') || e.textContent.trim())).length"
    )
    checks.that(nameless == 0, "everything that can be reached has a name")


def widths(browser, checks, pictures):
    browser.size(*DESKTOP)
    if pictures:
        browser.picture(pictures / "desktop.png")
    checks.that(
        browser.evaluate("document.documentElement.scrollWidth") <= DESKTOP[0], "the page is no wider than a desktop"
    )
    browser.media(scheme="dark")
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    drawn = browser.evaluate("getComputedStyle(document.querySelector('#roofline .panels svg > rect')).fill")
    checks.that(paper == drawn != "rgb(255, 255, 255)", f"page and pictures are dark where the screen is ({paper})")
    if pictures:
        browser.picture(pictures / "dark.png")
    browser.media()
    browser.size(*PHONE, mobile=True)
    checks.that(browser.evaluate("document.documentElement.scrollWidth") <= PHONE[0], "the page is no wider than a phone")
    if pictures:
        browser.picture(pictures / "phone.png")
    browser.size(PAPER, 688)
    browser.media("print")
    wide = browser.evaluate(
        f"Array.from(document.querySelectorAll('table, svg')).filter((e) => e.getBoundingClientRect().right > {PAPER} + 1)"
        ".map((e) => (e.closest('[aria-label]') ?? e).getAttribute('aria-label'))"
    )
    checks.that(wide == [], f"no table and no picture is wider than paper {wide}")
    if pictures:
        browser.picture(pictures / "print.png")
        sheet = browser.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        (pictures / "print.pdf").write_bytes(base64.b64decode(sheet["data"]))
    browser.media()


def check(browser, page, pictures):
    checks = Checks()
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ["Page", "Runtime", "Log", "Network"]:
        browser.call(f"{domain}.enable")
    browser.size(*DESKTOP)
    browser.media()
    browser.call("Page.navigate", url=page.resolve().as_uri())
    for _ in range(100):
        if browser.evaluate("document.readyState === 'complete' && location.protocol === 'file:'"):
            break
        time.sleep(0.1)
    checks.that(browser.evaluate("document.querySelector('.headline').textContent.length > 10"), "the headline is there")
    sorting(browser, checks)
    copying(browser, checks)
    pointing(browser, checks)
    keyboard(browser, checks)
    widths(browser, checks, pictures)
    complaints, loaded = [], []
    for event in browser.events:
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            complaints.append(params["exceptionDetails"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            complaints.append(str(params["args"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            complaints.append(params["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            loaded.append(params["request"]["url"])
    checks.that(complaints == [], f"nothing is complained about {complaints}")
    others = [url for url in loaded if not url.startswith("data:") and url != page.resolve().as_uri()]
    checks.that(others == [], f"nothing else is loaded {others}")
    return checks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="a report folder, or its index.html")
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="folder to write pictures of the page to")
    args = parser.parse_args()
    page = args.report / "index.html" if args.report.is_dir() else args.report
    if not page.is_file():
        print(f"cannot find `{page}`", file=sys.stderr)
        return 2
    named = os.environ.get("CHROMIUM")
    program = next(filter(None, map(shutil.which, [named] if named else NAMES)), None)
    if program is None:
        print(f"cannot find a browser: {named or ', '.join(NAMES)}; set CHROMIUM to one", file=sys.stderr)
        return 2
    if args.screenshots:
        args.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            checks = check(browser, page, args.screenshots)
        finally:
            browser.close()
    print(f"{checks.done} checks, {len(checks.failed)} failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
