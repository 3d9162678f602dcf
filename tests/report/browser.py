"""A headless Chromium, driven through a pipe: the DevTools protocol with Python's own library."""

import base64
import json
import os
import pathlib
import select
import subprocess
import tempfile
import time


class Browser:
    def __init__(self, chromium, width=1300, height=900):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.to = os.pipe()
        self.come, from_browser = os.pipe()
        # The browser reads its descriptor 3 and writes its descriptor 4.
        keep = max(to_browser, from_browser, 5) + 1
        script = (
            f"exec {keep}<&{to_browser} {keep + 1}>&{from_browser} 3<&{keep} 4>&{keep + 1}; "
            'exec "$0" "$@"'
        )
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                "--no-first-run",
                f"--user-data-dir={self.folder.name}",
                f"--window-size={width},{height}",
                "--hide-scrollbars",
                "about:blank",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.buffer, self.events, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.to)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.come)
        self.folder.cleanup()

    def receive(self, deadline):
        while b"\0" not in self.buffer:
            assert select.select([self.come], [], [], max(0, deadline - time.time()))[
                0
            ], "the browser does not answer"
            bytes_ = os.read(self.come, 1 << 20)
            assert bytes_, "the browser has ended"
            self.buffer += bytes_
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, timeout=120, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data) :]
        deadline = time.time() + timeout
        while True:
            answer = self.receive(deadline)
            if answer.get("id") != self.number:
                self.events.append(answer)
                continue
            assert "error" not in answer, f"{method}: {answer}"
            return answer["result"]

    def resize(self, width, height, mobile=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def open(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        deadline = time.time() + 120
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.receive(deadline))

    def run(self, script):
        """The value of an expression, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, script, seconds=60):
        deadline = time.time() + seconds
        while not self.run(script):
            assert time.time() < deadline, f"never true: {script}"
            time.sleep(0.1)

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, from_, to):
        self.mouse("mouseMoved", *from_)
        self.mouse("mousePressed", *from_, button="left", buttons=1, clickCount=1)
        for t in (0.3, 0.7, 1):
            self.mouse(
                "mouseMoved",
                *(a + (b - a) * t for a, b in zip(from_, to)),
                button="left",
                buttons=1,
            )
        self.mouse("mouseReleased", *to, button="left", clickCount=1)

    def double_click(self, x, y):
        for count in (1, 2):
            self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=count)
            self.mouse("mouseReleased", x, y, button="left", clickCount=count)

    def complaints(self):
        """What the console and the network have said against the page."""
        found = []
        for event in self.events:
            params, method = event.get("params", {}), event.get("method")
            if method == "Runtime.exceptionThrown":
                found.append(
                    params["exceptionDetails"].get("exception", {}).get("description")
                    or str(params)
                )
            elif method == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self):
        return [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]

    def screenshot(self, path, whole=False, clip=None):
        options = {"captureBeyondViewport": whole}
        if clip:
            options["clip"] = {**clip, "scale": 1}
        elif whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {
                "x": 0,
                "y": 0,
                "width": size["width"],
                "height": size["height"],
                "scale": 1,
            }
        picture = self.call("Page.captureScreenshot", format="png", **options)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(picture))
