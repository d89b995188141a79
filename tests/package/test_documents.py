"""The documents: every path, test, module and section that they name is there."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.pages import GENERATED

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    ROOT.glob("docs/**/*.md")
)

PATH = re.compile(r"`((?:outboxq|tests|benchmarks|examples|docs)/[\w/.*{},-]*)(?:::([\w.]+))?`")
TEST = re.compile(r"`(test_\w+)`")
COMMAND = re.compile(r"python -m ((?:outboxq|tests|benchmarks)[\w.]*)")
LINK = re.compile(r"\]\(([\w./-]*\.md)?(#[\w-]+)?\)")
CODE = re.compile(r"```.*?```", re.DOTALL)

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


def anchors(document: Path) -> set[str]:
    """The sections of a document, as links name them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", document.read_text()), re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_every_path_is_there(document: Path) -> None:
    """A path in backticks leads to a file or a folder; behind `::` stands a name in it, or a class and its method."""
    for path, name in PATH.findall(document.read_text()):
        found = list(ROOT.glob(path.replace("NN_....py", "*.py")))
        assert found, path
        for part in filter(None, name.split(".")):
            made = re.compile(rf"^ *(?:def |class |async def )?{part}\b[^.]", re.MULTILINE)
            assert any(made.search(file.read_text()) for file in found), f"{path}::{name}"


@every_document
def test_every_test_is_there(document: Path) -> None:
    """A test that is named without its file stands in one of them."""
    sources = "".join(path.read_text() for folder in ("tests", "examples") for path in ROOT.glob(f"{folder}/**/*.py"))
    assert [name for name in TEST.findall(document.read_text()) if f"def {name}(" not in sources] == []


@every_document
def test_every_module_can_be_run(document: Path) -> None:
    """What follows `python -m` is a module."""
    assert [name for name in COMMAND.findall(document.read_text()) if not importlib.util.find_spec(name)] == []


@every_document
def test_every_link_leads_somewhere(document: Path) -> None:
    """A link to another document, or to a section, finds it."""
    for name, anchor in LINK.findall(document.read_text()):
        target = document.parent / name if name else document
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}{anchor}"


# Tables to look things up in, alerts' answers among them.
TO_LOOK_UP = ("command-line.md", "mutants.md", "runbooks.md")


def test_a_guide_is_read_in_ten_minutes() -> None:
    """A page has at most 1,500 words, unless it is there to look things up in; the README has 700."""
    guides = [page for page in (ROOT / "docs").glob("*.md") if page.name not in TO_LOOK_UP]
    assert {page.name: words for page in guides if (words := len(page.read_text().split())) > 1_500} == {}
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_the_pages_together_are_a_book_that_can_be_read() -> None:
    """All that is written by hand comes to at most 60,000 words."""
    pages = [page for page in (ROOT / "docs").glob("**/*.md") if page.name != "command-line.md"]
    assert sum(len(GENERATED.sub("", page.read_text()).split()) for page in pages) <= 60_000
