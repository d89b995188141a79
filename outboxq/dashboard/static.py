"""Static files: the dashboard's own, and those of other projects, whose versions and hashes are in vendor.toml.

The path of each file contains a part of the file's hash: browsers may cache the file for ever, and load another path
after an upgrade.
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
    """Return the bytes of a static file.

    Raises:
        KeyError: no file has this name.
    """
    if name not in NAMES:
        raise KeyError(name)
    return files("outboxq.dashboard").joinpath("static", *name.split("/")).read_bytes()


@cache
def static_version(name: str) -> str:
    """Return the beginning of a static file's hash, which is a part of the file's path."""
    return hashlib.sha256(static_bytes(name)).hexdigest()[:16]
