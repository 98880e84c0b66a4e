"""Pages in a real browser: Chromium, spoken to over a pipe in its DevTools protocol, without any library.

with opened(page, dark=True, width=390) as tab:
    tab.press("Tab")
    assert tab.run("document.activeElement.id") == "first"
assert tab.messages == []
"""

import base64
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

import pytest

CHROMIUM = next((x for name in ("chromium", "chromium-browser", "google-chrome") if (x := shutil.which(name))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"),
)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
PATIENCE = 60.0  # seconds for the browser to answer

# For every element that shows text of its own: the contrast with the nearest opaque ground behind it.
CONTRASTS = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => top.slice(0, 3).map((x, i) => x * top[3] + under[i] * (1 - top[3]));
  const light = ([r, g, b]) => {
    const f = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const ground = element => {
    const layers = [];
    for (let x = element; x; x = x.parentElement) {
      const style = getComputedStyle(x);
      if (style.opacity !== '1') return null;
      layers.push(rgba(style.backgroundColor));
      if (layers[layers.length - 1][3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = [];
  for (const element of document.querySelectorAll('body, body *')) {
    const text = [...element.childNodes].filter(x => x.nodeType === 3).map(x => x.data).join('').trim();
    if (!text || !element.getClientRects().length || element.matches('script, style, title')) continue;
    const style = getComputedStyle(element), under = ground(element);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = under === null ? [0, 0] : [light(over(rgba(colour), under)), light(under)].sort((x, y) => y - x);
    found.push({text: text.slice(0, 60), ratio: (a + 0.05) / (b + 0.05)});
  }
  return found;
})()
"""


class Tab:
    """A page in the browser, and what the browser said about it: `messages` has the console's, errors and requests."""

    def __init__(self, commands: int, replies: int):
        self._commands, self._replies, self._pending, self._count = commands, replies, b"", 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._count:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self._note(reply)

    def wait_for(self, event: str) -> None:
        """Until the browser tells this event."""
        while (told := self._read()).get("method") != event:
            self._note(told)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._pending:
            ready, _, _ = select([self._replies], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._replies, 1 << 20) if ready else b""
            if not more:
                raise TimeoutError("the browser does not answer")
            self._pending += more
        reply, _, self._pending = self._pending.partition(b"\0")
        return json.loads(reply)

    def _note(self, told: dict[str, Any]) -> None:
        method, what = told.get("method"), told.get("params", {})
        if method == "Log.entryAdded":
            self.messages.append(what["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(x.get("value", x.get("description"))) for x in what["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(what["exceptionDetails"].get("exception", what["exceptionDetails"])))
        elif method == "Network.requestWillBeSent" and not what["request"]["url"].startswith("data:"):
            self.requests.append(what["request"]["url"])

    def open(self, page: Path, *, dark: bool, width: int, height: int) -> None:
        """The page, as wide and high as this, when it has loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """A key of the keyboard, of KEYS."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        for _ in range(times):
            self.send("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def settle(self) -> None:
        """Until the browser has drawn the page, and scrolled it if it was about to."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def point(self, selector: str, *, click: bool = False) -> None:
        """The mouse to the middle of the first element of a CSS selector, which is scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
        self.settle()
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({element}.getBoundingClientRect())"
        )
        place = {"x": box[0], "y": box[1]}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window, so that all of it would have to be scrolled."""
        return int(self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def contrasts(self) -> list[tuple[float, str]]:
        """The contrast (WCAG) of every text that is shown with what is behind it, the least first."""
        return sorted((x["ratio"], x["text"]) for x in self.run(CONTRASTS))

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the whole page, or of what the window shows."""
        shot = self.send(
            "Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": self._all()} if whole else {})
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _all(self) -> dict[str, Any]:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}


@contextmanager
def opened(page: Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> Iterator[Tab]:
    """A page in a browser of its own, which is closed afterwards. The test is skipped where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    (theirs_in, commands), (replies, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from file 3 and writes replies to file 4. Large numbers do not clash with these.
        child = [os.dup2(theirs_in, 103), os.dup2(theirs_out, 104)]
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, 103, 3), (os.POSIX_SPAWN_DUP2, 104, 4)]
        actions += [(os.POSIX_SPAWN_OPEN, i, os.devnull, os.O_WRONLY, 0) for i in (1, 2)]
        arguments = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = os.posix_spawn(CHROMIUM, arguments, os.environ, file_actions=actions, setpgroup=0)
        for end in (theirs_in, theirs_out, *child):
            os.close(end)
        tab = Tab(commands, replies)
        try:
            tab.open(page, dark=dark, width=width, height=height)
            yield tab
            tab.settle()  # whatever the page has yet to say is said before this
        finally:
            with suppress(OSError):
                os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(commands)
            os.close(replies)
