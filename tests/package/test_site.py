"""The documentation as a site: it builds without a warning, and reaches for no other host."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.pages import ROOT

pytestmark = pytest.mark.large

# What a page loads by itself, which links that a reader may follow are not.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?([^"'\s>]+)|"""
    r"""<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon|dns-prefetch))[^>]*?\bhref=["']?([^"'\s>]+)|"""
    r"""@import\s+(?:url\()?["']?([^"')\s;]+)|\burl\(["']?([^"')]+)""",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocs", reason="the site is built by what pip install 'outboxq[docs]' brings")
    built = tmp_path_factory.mktemp("site")
    # Not --quiet, which would hide the warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return built


def test_the_site_builds_strictly_with_every_page(site: Path) -> None:
    """Every page of docs/ is a page of the site, and so are the README, CONTRIBUTING and the examples."""
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")}
    examples = {Path("examples", path.parent.name + ".html") for path in ROOT.glob("examples/*/README.md")}
    outside = {Path("readme.html"), Path("contributing.html"), Path("changelog.html")}
    assert {path for path in pages | examples | outside if not (site / path).exists()} == set()


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    """No font, script, style or picture of a page comes from a network."""
    foreign = set()
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for groups in LOADED.findall(path.read_text()):
            found = next(filter(None, groups))
            if urlsplit(found).netloc:
                foreign.add((path.name, found))
    assert foreign == set()


def test_no_page_shows_markup_that_was_not_understood(site: Path) -> None:
    """Fences, tables and entries of the reference became HTML."""
    for path in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script|title)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        assert [markup for markup in ("```", "\n:::", "<p>|") if markup in text] == [], path
