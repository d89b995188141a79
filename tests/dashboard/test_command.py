"""`outboxq dashboard`: where it may listen, and how one logs in."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from outboxq.dashboard import PasswordLogin, Role
from outboxq.dashboard.logins import password_line
from outboxq.errors import ConfigError
from outboxq.postgres import Database
from tests.support.cli import environment, run
from tests.support.waiting import PATIENCE

_LINK = re.compile(r"(http://\S+?)(/login\?token=\S+|/)\n")


@contextmanager
def running(database: Database, *words: str, **variables: str) -> Iterator[tuple[str, str]]:
    """The command, until the block ends: its address, and what it leads to."""
    command = [sys.executable, "-m", "outboxq", "dashboard", "--listen", "127.0.0.1:0", *words]
    variables = environment(database.url) | variables
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = _LINK.search(process.stderr.readline() + "\n")
        assert found is not None
        yield found[1], found[2]
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, rest


@pytest.mark.wide
def test_on_loopback_a_link_logs_in_once(outboxq_database: Database) -> None:
    """The link leads to the pages, and a second browser does not get in by it."""
    with running(outboxq_database, "--role", "operator") as (address, link):
        with httpx.Client(base_url=address, follow_redirects=True, timeout=PATIENCE) as browser:
            page = browser.get(link)
            assert page.status_code == 200
            assert "operator" in page.text
        assert "Log in" in httpx.get(address + link, timeout=PATIENCE).text
        assert httpx.get(address, headers={"host": "evil.test"}, timeout=PATIENCE).status_code == 400


@pytest.mark.wide
def test_a_token_of_the_environment_logs_in(outboxq_database: Database) -> None:
    """Its role is that of --role."""
    token = "a token of some length"
    with (
        running(outboxq_database, OUTBOXQ_DASHBOARD_TOKEN=token) as (address, _),
        httpx.Client(base_url=address, follow_redirects=True, timeout=PATIENCE) as browser,
    ):
        form = re.search(r'name="csrf" value="(\w+)"', browser.get("/").text)
        assert form is not None
        given = {"csrf": form[1], "password": token}
        assert "reader" in browser.post("/login", data=given, headers={"origin": address}).text


@pytest.mark.first_and_last
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:8484", "example.com:8484"])
def test_an_address_that_others_reach_takes_a_way_to_log_in(listen: str, outboxq_database: Database) -> None:
    """It ends with 2, and says what is missing."""
    done = run("dashboard", "--listen", listen, url=outboxq_database.url)
    assert done.exit_code == 2
    assert "OUTBOXQ_DASHBOARD_TOKEN" in done.stderr


def test_a_header_takes_a_proxy(outboxq_database: Database) -> None:
    """A header that anyone may send names nobody."""
    done = run("dashboard", "--trusted-header", "x-user", url=outboxq_database.url)
    assert done.exit_code == 2
    assert "--trusted-proxy" in done.stderr


@pytest.mark.wide
def test_passwords_are_kept_as_hashes(tmp_path: Path) -> None:
    """A line has the name, the role and a hash; a wrong password, or name, lets nobody in."""
    file = tmp_path / "users.txt"
    line = password_line("anna", Role.ADMIN, "correct horse")
    file.write_text(f"# users\n\n{line}\n")
    assert "correct horse" not in line
    login = PasswordLogin.from_file(str(file))
    user = login.log_in("anna", "correct horse")
    assert user is not None
    assert (user.name, user.role) == ("anna", Role.ADMIN)
    assert login.log_in("anna", "wrong") is None
    assert login.log_in("bob", "correct horse") is None
    for wrong in ("anna:admin:plain:x", f"{line}x", "anna"):
        with pytest.raises(ConfigError):
            PasswordLogin([wrong])


def test_without_the_dashboard_nothing_of_it_is_imported() -> None:
    """Neither the package nor the command line loads what only the dashboard needs."""
    code = (
        "import sys, outboxq, outboxq.cli.app\n"
        "found = {'starlette', 'jinja2', 'uvicorn', 'anyio', 'outboxq.dashboard'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("missing", ["starlette", "jinja2"])
def test_a_missing_extra_is_named(missing: str) -> None:
    """The command ends with 2 and says what to install."""
    code = f"import sys\nsys.modules[{missing!r}] = None\nfrom outboxq.__main__ import main\nmain(['dashboard'])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'outboxq[dashboard]'" in done.stderr
