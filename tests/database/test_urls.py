"""Database URLs: every spelling becomes one, several hosts included, and what the URL says wins over our defaults."""

import pytest
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from outboxq.database.engines import connect_arguments
from outboxq.database.urls import host_names, psycopg_url
from outboxq.errors import ConfigError


def arguments(url: str) -> dict[str, object]:
    """What psycopg would be called with."""
    return PGDialect_psycopg().create_connect_args(psycopg_url(url))[1]


@pytest.mark.parametrize(
    ("url", "hosts", "ports"),
    [
        ("postgresql://u:p@h1:5432,h2:5433/db?target_session_attrs=read-write", "h1,h2", "5432,5433"),
        ("postgresql+asyncpg://u:p@h1,h2:5433/db", "h1,h2", ",5433"),
        ("postgres://u:p@[::1]:5432,[::2]:5433/db", "::1,::2", "5432,5433"),
        ("postgresql://u:p@%2Fvar%2Frun:5432,h2:5433/db", "/var/run,h2", "5432,5433"),
        ("postgresql://u:p@/db?host=h1:5432&host=h2:5433", "h1,h2", "5432,5433"),
        ("postgresql://u:p@/db?host=h1,h2&port=5432,5433", "h1,h2", "5432,5433"),
        ("postgresql://u:p@/db?host=h1,h2&port=6432", "h1,h2", "6432,6432"),
        ("postgresql://u:p@h1,h2,h3/db", "h1,h2,h3", ",,"),
        ("postgresql://u:p@ignored,too/db?host=h9", "h9", None),
    ],
)
def test_each_spelling_of_several_hosts_reaches_libpq(url: str, hosts: str, ports: str | None) -> None:
    """Both libpq's form and SQLAlchemy's name the same servers, and the rest of the URL is kept."""
    given = arguments(url)
    assert given["host"] == hosts
    assert given.get("port") == ports
    assert (given["user"], given["password"], given["dbname"]) == ("u", "p", "db")


def test_a_rendered_url_of_several_hosts_means_the_same_again() -> None:
    """Children of a supervisor get it as text."""
    url = "postgresql://u:p%40:%2F@h1:5432,h2:5433/db?target_session_attrs=any"
    rendered = psycopg_url(url).render_as_string(hide_password=False)
    assert arguments(rendered) == arguments(url)
    assert arguments(url)["password"] == "p@:/"
    assert host_names(psycopg_url(rendered)) == ("h1", "h2")


@pytest.mark.parametrize("url", ["postgresql://u:p@h1:5432/db", "postgresql://u@/db?host=%2Ftmp", "postgresql:///db"])
def test_one_host_is_left_as_it_is(url: str) -> None:
    """Nothing is added to a URL that names one server or none."""
    assert psycopg_url(url).render_as_string(hide_password=False) == url.replace("://", "+psycopg://", 1)
    assert "target_session_attrs" not in connect_arguments(psycopg_url(url), "test")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@h1:x,h2:5433/db",
        "postgresql://u:secret@/db?host=h1,h2&port=1,2,3",
        "postgresql://u:secret@/db?host=h1:1&host=h2:2&port=3",
        "mysql://u:secret@h1,h2/db",
        "h1,h2",
    ],
)
def test_what_cannot_be_meant_is_refused_without_the_password(url: str) -> None:
    """The message never shows the URL."""
    with pytest.raises(ConfigError) as refusal:
        psycopg_url(url)
    assert "secret" not in str(refusal.value)


def test_several_hosts_mean_the_one_that_takes_writes() -> None:
    """A relay can do nothing on a standby; whoever asks for another session gets it."""
    several = connect_arguments(psycopg_url("postgresql://h1,h2/db"), "test")
    assert several["target_session_attrs"] == "read-write"
    asked = connect_arguments(psycopg_url("postgresql://h1,h2/db?target_session_attrs=any"), "test")
    assert "target_session_attrs" not in asked


def test_keepalives_are_on_unless_the_url_says_otherwise() -> None:
    """Both ends give up a vanished peer after 25 seconds; each value in the URL wins over ours."""
    ours = connect_arguments(psycopg_url("postgresql://h1/db"), "test")
    assert (ours["keepalives"], ours["keepalives_idle"], ours["tcp_user_timeout"]) == (1, 10, 25_000)
    assert "tcp_keepalives_idle=10" in str(ours["options"])
    theirs = connect_arguments(
        psycopg_url("postgresql://h1/db?keepalives_idle=1&options=-c%20tcp_keepalives_idle%3D2"), "test"
    )
    assert "keepalives_idle" not in theirs
    assert theirs["keepalives_interval"] == 5
    assert str(theirs["options"]).endswith("-c tcp_keepalives_idle=2")


def test_the_users_pgoptions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq would drop the variable for our options."""
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=7MB")
    assert str(connect_arguments(psycopg_url("postgresql://h1/db"), "test")["options"]).endswith("-c work_mem=7MB")


def test_prepared_statements_can_be_turned_off_in_the_url() -> None:
    """psycopg takes a number or None, and a URL holds text."""
    assert (
        connect_arguments(psycopg_url("postgresql:///db?prepare_threshold=none"), "test")["prepare_threshold"] is None
    )
    assert connect_arguments(psycopg_url("postgresql:///db?prepare_threshold=7"), "test")["prepare_threshold"] == 7
    with pytest.raises(ConfigError, match="prepare_threshold"):
        connect_arguments(psycopg_url("postgresql:///db?prepare_threshold=never"), "test")
