"""What a package index and `pip install` are told: dependencies, extras, and a description whose links work."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

from hatch_build import without_relative_links

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)]+)\)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built here and now."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = directory.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def requirements(metadata: Message, extra: str | None = None) -> list[str]:
    """What is required without an extra, or by one."""
    of_extra = f"; extra == '{extra}'"
    lines: Iterable[str] = metadata.get_all("Requires-Dist", [])
    if extra is None:
        return [line for line in lines if "extra ==" not in line]
    return [line.removesuffix(of_extra) for line in lines if line.endswith(of_extra)]


def test_without_an_extra_psycopg_comes_without_a_libpq_of_its_own(metadata: Message) -> None:
    """A library leaves it to its user which libpq is used: the wheel's, the system's, or a compiled one."""
    assert [line for line in requirements(metadata) if line.startswith("psycopg")] == ["psycopg>=3.2.1"]
    assert requirements(metadata, "binary") == ["psycopg[binary]>=3.2.1"]


@pytest.mark.parametrize("extra", ["cli", "dashboard", "demo", "dev", "fastapi", "test", "testing"])
def test_every_extra_for_convenience_brings_libpq(extra: str, metadata: Message) -> None:
    """So both commands of the README work on a machine that has none."""
    assert "psycopg[binary]>=3.2.1" in requirements(metadata, extra)


def test_the_extras_of_the_readmes_commands_exist(metadata: Message) -> None:
    """A misspelt extra is a mere warning of pip's."""
    documents = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
    named = {
        extra
        for document in documents
        for extras in re.findall(r"(?:outboxq|'\.)\[([\w,]+)\]", document.read_text())
        for extra in extras.split(",")
    }
    assert {"demo", "test", "cli", "binary"} <= named <= set(metadata.get_all("Provides-Extra", []))


def test_no_link_of_the_description_leads_nowhere_on_an_index_page(metadata: Message) -> None:
    """There is no `docs/` beside it: a link is an address, or a section of the same page."""
    description = CODE.sub("", metadata.get_payload())
    assert [link for link in LINK.findall(description) if not link.startswith(("https://", "#"))] == []
    assert "# outboxq" in description
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_description_is_the_readme_but_for_its_links(metadata: Message) -> None:
    """Code in it stays as it is, and so does every line that no link touches."""
    readme, description = (ROOT / "README.md").read_text(), metadata.get_payload()
    assert CODE.findall(description) == CODE.findall(readme)
    without_links = {line for line in readme.splitlines() if not set("[]") & set(line)}
    assert without_links <= set(description.splitlines())


def test_relative_links_become_addresses_when_there_is_a_source() -> None:
    """A `Source` among the project's URLs is all that it takes; images, sections and addresses included."""
    text = "[a](docs/a.md#b) ![p](docs/p.svg) [s](#s) [x](https://x.test/y)"
    assert without_relative_links(text, "https://code.test/main/") == (
        "[a](https://code.test/main/docs/a.md#b) ![p](https://code.test/main/docs/p.svg) [s](#s) [x](https://x.test/y)"
    )
    assert without_relative_links(text, None) == "a (`docs/a.md`) p [s](#s) [x](https://x.test/y)"


def test_the_wheel_has_the_pages_of_the_dashboard_and_their_files(wheel: Path) -> None:
    """Templates, styles, scripts, and the licences of those that are others'."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    here = ROOT / "outboxq" / "dashboard"
    for path in [*here.glob("templates/*"), *here.glob("static/*.*"), *here.glob("static/vendor/*")]:
        assert path.relative_to(ROOT).as_posix() in packed
