"""A real browser, and a text that tries to take it over."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HOSTILE = (
    "\"'></pre></title></textarea></svg></style><script>document.title='taken';fetch('/taken-script')</script>"
    "<img src=/taken-image onerror=\"document.title='taken'\"><svg onload=\"document.title='taken'\"></svg>"
    "<style>@import url(/taken-style);</style><base href=/taken-base/><iframe src=/taken-frame></iframe>"
    "<link rel=stylesheet href=/taken-sheet><meta http-equiv=refresh content='0;url=/taken-refresh'>"
    "<form action=/taken-form><button id=taken autofocus onfocus=\"document.title='taken'\">x</button></form>"
    "<a id=taken href=\"javascript:document.title='taken'\">x</a>{{ 7 * 7 }}{% raw %}${1}]]><!--\u202e\u2066\x1b[31m"
)
"""What it gets loaded or run has `taken` in its address or sets the title to it."""


def browse(url: str, profile: Path, *, seconds: float = 2.0, width: int = 800) -> str:
    """Return what a browser makes of a page once its scripts have run for some seconds of its own
    time, which passes faster than that of a clock. Its window is at least 500 pixels wide.
    """
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here; `apt-get install chromium` brings it")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        # Pages of others, such as Prefect's, ask for addresses elsewhere; here there are none.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--virtual-time-budget={seconds * 1000:.0f}",
        f"--user-data-dir={profile}",
        f"--window-size={width},600",
    ]
    return subprocess.run(
        [program, *options, "--dump-dom", url], capture_output=True, text=True, check=True, timeout=120
    ).stdout
