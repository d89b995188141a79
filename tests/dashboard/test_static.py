"""The files that pages load: of the size that was promised, and those of others as they were published."""

import hashlib
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from outboxq.dashboard import Role, create_app
from outboxq.dashboard.static import NAMES, static_bytes, static_version
from tests.support.dashboard import as_user, client_of
from tests.tools.vendor import DIRECTORIES

STATIC = Path(str(files("outboxq.dashboard"))) / "static"
TEMPLATES = sorted((STATIC.parent / "templates").glob("*.html"))
LICENCES = {"0BSD", "MIT"}
VENDORED = [
    (folder, package)
    for folder in DIRECTORIES
    for package in tomllib.loads((folder / "vendor.toml").read_text())["package"]
]


def test_our_own_files_are_small() -> None:
    """16 kB of CSS, and 150 lines of JavaScript."""
    assert len((STATIC / "app.css").read_bytes()) <= 16_000
    assert len((STATIC / "app.js").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("folder", "package"), VENDORED, ids=[package["name"] for _, package in VENDORED])
def test_files_of_others_are_as_published_with_their_licence(folder: Path, package: dict[str, Any]) -> None:
    """Each has the hash that vendor.toml has, and its licence beside it."""
    found = {each["name"]: each["sha256"] for each in package["file"]}
    assert any(name.endswith(".LICENSE") for name in found)
    for name, digest in found.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    # What only tests run may have terms for those who pass it on.
    assert package["license"] in (LICENCES if folder.is_relative_to(STATIC) else {*LICENCES, "MPL-2.0"})
    assert str(package["integrity"]).startswith("sha512-")


def test_every_file_of_others_is_named() -> None:
    """Nothing lies there that vendor.toml does not know."""
    for folder in DIRECTORIES:
        named = {each["name"] for place, package in VENDORED if place == folder for each in package["file"]}
        assert {each.name for each in folder.iterdir()} == {*named, "vendor.toml"}


@pytest.mark.parametrize("template", TEMPLATES, ids=[each.name for each in TEMPLATES])
def test_a_template_escapes_everything_and_has_nothing_inline(template: Path) -> None:
    """No `safe`, no style, no handler, no script but a file of ours; every attribute has quotes."""
    source = template.read_text()
    assert not re.search(r"\|\s*safe\b|Markup|autoescape|<style|\sstyle=|\son\w+\s*=|https?://", source)
    assert not re.search(r"<script(?! (?:defer )?src=)", source)
    assert not re.search(r"\s[\w-]+=\{\{", source)


def test_a_file_is_kept_by_its_hash(engine: Engine) -> None:
    """Browsers keep a file for good, because another one has another path."""
    with client_of(create_app({"orders": engine}, auth=as_user(None))) as client:
        for name in NAMES:
            answer = client.get(f"/static/{static_version(name)}/{name}")
            assert (answer.status_code, answer.content) == (200, static_bytes(name))
            assert "immutable" in answer.headers["cache-control"]
        for path in ("0/app.css", f"{static_version('app.css')}/app.js", "0/vendor/vendor.toml"):
            assert client.get(f"/static/{path}").status_code == 404
    assert create_app({"orders": engine}, auth=as_user(Role.READER)) is not None
