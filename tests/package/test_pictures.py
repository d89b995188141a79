"""The pictures of the dashboard in the documentation: one of every page in each look, small, and shown."""

import re

from tests.tools.screenshots import DOCS, LOOKS, pictures

_PAGE = DOCS.parent / "dashboard.md"


def test_every_page_of_the_dashboard_has_its_pictures() -> None:
    """Light, dark and narrow; `python -m tests.tools.screenshots --docs` makes those that are missing."""
    wanted = {f"{name}-{look.name}.webp" for name in pictures() for look in LOOKS}
    assert {each.name for each in DOCS.iterdir()} == wanted
    assert set(re.findall(r"\]\(dashboard/([^)]+)\)", _PAGE.read_text())) == wanted


def test_the_pictures_are_small() -> None:
    """All of them together, because everyone who clones the repository takes them along."""
    assert sum(each.stat().st_size for each in DOCS.iterdir()) < 6_000_000
