"""Small real servers in the place of vLLM's: each is one process that answers `/health` on a
port.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agentr_core.models.vllm.replicas import Launch
from agentr_core.recipes.models import VllmConfig

WELL = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(500 if os.path.exists(sys.argv[1] + ".ill") else 200)
        self.end_headers()
print("serving", sys.argv[1], "as", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
BROKEN = "print('INFO reading'); raise ValueError('no room for the cache')"
SLOW = "import time; print('still reading', flush=True); time.sleep(600)"


def launch(model: Path, **settings: Any) -> Launch:
    """Return a launch of a model that is no more than a path."""
    return Launch(
        model=model,
        served_name=model.name,
        device="cpu",
        dtype="float32",
        context_length=512,
        settings=VllmConfig(**settings),
    )


def command(program: str) -> Any:
    """Return what makes the command line of a replica that runs a program with the model's path and
    the port.
    """
    return lambda python, launch, port: [sys.executable, "-S", "-E", "-c", program, str(launch.model), str(port)]
