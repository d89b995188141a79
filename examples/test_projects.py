"""The examples as a reader meets them: each is a project that can be copied, and its README is what happens."""

import os
import re
import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from outboxq import migrations
from outboxq.postgres import Server
from tests.support.projects import EXAMPLES, Installation, copy_project, install, owned_database
from tests.support.readme import Step, blocks, read_steps, run_steps

LIMIT_SECONDS = 240
# What the READMEs do with more than a test has time for.
SMALLER = {
    "transfers": {"20000": "1200", "20,000": "1,200", "1000": "100"},
}

every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Where the copies run: with outboxq installed, and without this checkout."""
    return install(tmp_path_factory.mktemp("installation"))


@pytest.mark.parametrize(
    ("session", "complaint"),
    [
        ("$ echo a\\\n  b\na b\n$ echo c", None),
        ("$ printf 'a 1\\nb 2\\n'\na ...\nb ...\n$ sleep 600 > log &", None),
        ("$ echo a\nb\n", "expected:\nb\nbut:\n$ echo a\na"),
        ("$ echo a; echo b\na\n", "expected:\na"),
        ("$ true\n$ (echo a; exit 3)\na\n", "it ended with 3"),
        ("$ exit 0\n$ echo b\nb\n", "no status"),
    ],
    ids=["as-said", "anything", "other", "more", "failed", "not-reached"],
)
def test_a_session_that_goes_otherwise_than_it_says_is_found(
    session: str, complaint: str | None, tmp_path: Path
) -> None:
    """Printed otherwise, printed more, ended with an error or not reached: each is told, with its command."""
    steps = read_steps(f"Text.\n\n```console\n{session.rstrip()}\n```\n\n```bash\n$ false\n```\n")
    told = nullcontext() if complaint is None else pytest.raises(AssertionError, match=re.escape(complaint))
    with told:
        run_steps(steps, directory=tmp_path, environment={"PATH": os.environ["PATH"]}, limit_seconds=60)


@pytest.mark.first_and_last
@every_example
@pytest.mark.wide
def test_the_readme_says_what_happens(
    example: Path, installation: Installation, outboxq_server: Server, tmp_path: Path
) -> None:
    """Its shell session runs in a copy of the folder, outside of the checkout, and prints what stands beneath."""
    project = copy_project(example, tmp_path)
    readme = (project / "README.md").read_text()
    with owned_database(outboxq_server) as url:
        run_steps(
            with_free_ports([made_smaller(example.name, step) for step in read_steps(readme)]),
            directory=project,
            environment=installation.environment(**{database_variable(readme): url}),
            limit_seconds=LIMIT_SECONDS,
        )


@pytest.mark.first_and_last
@every_example
@pytest.mark.large
def test_the_tests_need_nothing_of_the_checkout(example: Path, installation: Installation, tmp_path: Path) -> None:
    """A copy's tests are imported and collected outside of the checkout, where `examples` and `tests` are unknown."""
    project = copy_project(example, tmp_path)
    environment = installation.environment(PYTHONSAFEPATH="1")
    for module in ("examples", "tests"):
        assert run([installation.python, "-c", f"import {module}"], tmp_path, environment).returncode != 0, module
    collected = run([installation.python, "-m", "pytest", "--collect-only", "-q"], project, environment)
    assert collected.returncode == 0, collected.stdout


@every_example
def test_no_module_names_its_own_package(example: Path) -> None:
    """Imports inside of the package are relative: it can be renamed by renaming its folder."""
    (package,) = (path.parent for path in example.glob("*/__init__.py"))
    absolute = re.compile(rf"^\s*(?:from|import) (?:{package.name}|examples|tests)\b", re.MULTILINE)
    assert [path for path in package.rglob("*.py") if absolute.search(path.read_text())] == []


@every_example
def test_one_revision_makes_the_newest_tables(example: Path) -> None:
    """A new project has no history of outboxq's steps."""
    revisions = [path.read_text() for path in example.glob("alembic/versions/*.py")]
    steps = [re.findall(r"migrations\.upgrade\(op, to=(\d+)\)", text) for text in revisions]
    assert [step for found in steps for step in found] == [str(migrations.LATEST)]


@every_example
def test_the_readme_names_the_database_of_the_compose_file(example: Path) -> None:
    """`docker compose up` makes the role and the database that the README exports, at that port."""
    exported = re.search(
        r"_DATABASE_URL=postgresql\+psycopg://(?P<user>\w+):(?P<password>\w+)@localhost:(?P<port>\d+)/(?P<name>\w+)$",
        blocks((example / "README.md").read_text(), "bash"),
        re.MULTILINE,
    )
    assert exported is not None
    compose = (example / "compose.yaml").read_text()
    assert f"127.0.0.1:{exported['port']}:5432" in compose
    script = example / "init.sql"
    if script.exists():
        assert f"./{script.name}:/docker-entrypoint-initdb.d/" in compose
        assert "CREATE ROLE {user} LOGIN PASSWORD '{password}'".format(**exported.groupdict()) in script.read_text()
        assert "CREATE DATABASE {name} OWNER {user}".format(**exported.groupdict()) in script.read_text()
    else:
        for variable, part in (("DB", "name"), ("USER", "user"), ("PASSWORD", "password")):
            assert f"POSTGRES_{variable}: {exported[part]}\n" in compose


def database_variable(readme: str) -> str:
    """The application's own variable for its database."""
    (name,) = re.findall(r"^export (\w+_DATABASE_URL)=", blocks(readme, "bash"), re.MULTILINE)
    return str(name)


def made_smaller(name: str, step: Step) -> Step:
    """The step with smaller numbers."""
    command, expected = step.command, step.expected
    for large, small in SMALLER.get(name, {}).items():
        command, expected = re.sub(rf"\b{large}\b", small, command), re.sub(rf"\b{large}\b", small, expected)
    return Step(command, expected)


def with_free_ports(steps: list[Step]) -> list[Step]:
    """The steps with ports that are free here."""
    commands = "\n".join(step.command for step in steps)
    named = dict.fromkeys(re.findall(r"(?:localhost:|--port )(\d+)", commands))
    sockets = {port: socket.create_server(("127.0.0.1", 0)) for port in named}
    free = {port: str(opened.getsockname()[1]) for port, opened in sockets.items()}
    for opened in sockets.values():
        opened.close()

    def replaced(text: str) -> str:
        return re.sub(r"\b\d+\b", lambda found: free.get(found[0], found[0]), text)

    return [Step(replaced(step.command), replaced(step.expected)) for step in steps]


def run(command: list[object], directory: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command; what it printed on both streams."""
    words = [str(word) for word in command]
    return subprocess.run(  # noqa: S603  # our own command lines
        words, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
