"""The files that pages load: ours, and those of other projects, whose versions and hashes are in vendor.toml.

The path of each has a part of its hash, so that a browser keeps it for good, and loads it again after an upgrade.
"""

import hashlib
from functools import cache
from importlib.resources import files

TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
NAMES = (
    "app.css",
    "app.js",
    "icon.svg",
    "vendor/htmx.min.js",
    "vendor/idiomorph-ext.min.js",
    "vendor/htmx-ext-sse.min.js",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
)


@cache
def static_bytes(name: str) -> bytes:
    """A file that pages may load.

    Raises:
        KeyError: no file has this name.
    """
    if name not in NAMES:
        raise KeyError(name)
    return files("outboxq.dashboard").joinpath("static", *name.split("/")).read_bytes()


@cache
def static_version(name: str) -> str:
    """A part of the hash of a file."""
    return hashlib.sha256(static_bytes(name)).hexdigest()[:16]
