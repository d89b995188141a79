"""`outboxq dashboard`: serve the dashboard as a program of its own, instead of within a web application."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outboxq.cli.errors import CommandFailed, WrongUsage
from outboxq.cli.options import DEFAULT_SCHEMA, DatabaseUrls, Schema, takes
from outboxq.cli.replica import ReadUrls, replicas_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import URL, Engine

    from outboxq.dashboard import HeaderAuth, PasswordLogin, TokenLogin
    from outboxq.dashboard.roles import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class DashboardOptions:
    """The options of `outboxq dashboard`."""

    listen: Annotated[
        str,
        typer.Option("--listen", metavar="ADDRESS", help="Where to serve it: [HOST:]PORT; port 0 takes a free one."),
    ] = "127.0.0.1:8484"
    role: Annotated[
        Literal["reader", "operator", "admin"],
        typer.Option(
            "--role",
            metavar="ROLE",
            help="What those may do who log in by the link, the token or a header: reader, operator or admin.",
        ),
    ] = "reader"
    environment: Annotated[
        str | None,
        typer.Option(
            "--environment",
            metavar="NAME",
            help="Shown on every page. With production, what changes many rows is confirmed by typing.",
            show_default=False,
        ),
    ] = None
    payloads: Annotated[
        Literal["redacted", "hidden", "shown"],
        typer.Option(
            "--payloads",
            metavar="HOW",
            help="What is shown of arguments, headers, results and errors. redacted: all but the values of keys that "
            "look secret; hidden: nothing; shown: everything.",
        ),
    ] = "redacted"
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="REGISTRY",
            help="The application's registry, such as myapp.jobs:jobs: what its kinds do is shown, and arguments that "
            "are edited have to fit its handlers.",
            show_default=False,
        ),
    ] = None
    users: Annotated[
        str | None,
        typer.Option(
            "--users",
            metavar="FILE",
            help="A file of users with their roles and hashes of their passwords: a line each, as --hash-password "
            "prints them.",
            show_default=False,
        ),
    ] = None
    header: Annotated[
        str | None,
        typer.Option(
            "--trusted-header",
            metavar="NAME",
            help="The header in which a proxy names who has logged in. Needs --trusted-proxy.",
            show_default=False,
        ),
    ] = None
    proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="A proxy whose header is believed: its address, or a network such as 10.0.0.0/8. May be repeated.",
            show_default=False,
        ),
    ] = None
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host-name",
            metavar="NAME",
            help="A name that browsers reach it by, beside the address. May be repeated.",
            show_default=False,
        ),
    ] = None
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--origin",
            metavar="URL",
            help="Where pages come from as browsers see it, such as https://ops.example.com, if a proxy ends TLS. May "
            "be repeated.",
            show_default=False,
        ),
    ] = None
    hash_password: Annotated[
        str | None,
        typer.Option(
            "--hash-password",
            metavar="USER",
            help="Ask for a password, print the line for the file of --users, with the role of --role, and end.",
            show_default=False,
        ),
    ] = None
    schema: Schema = DEFAULT_SCHEMA
    databases: Annotated[
        list[str] | None,
        typer.Option(
            "--database",
            metavar="NAME=URL",
            help="A database, and its name in the dashboard. May be repeated. Other users of the machine can see the "
            "URL here: without this option those of OUTBOXQ_DATABASE_URL are shown, under the names of the databases.",
            show_default=False,
        ),
    ] = field(default=None, repr=False)
    database_url: DatabaseUrls = field(default=None, repr=False)
    read_url: ReadUrls = field(default=None, repr=False)


@takes(DashboardOptions)
def dashboard(options: DashboardOptions) -> None:
    """Show queues, jobs, dead letters and relays in a browser.

    On the loopback address, without another way to log in, it prints a link that logs in once, within ten minutes. Any
    other address needs a way to log in: the variable OUTBOXQ_DASHBOARD_TOKEN with a token of 16 characters or more,
    --users, or --trusted-header. Needs outboxq[dashboard], and a database role that may read (outboxq_reader), or that
    may act (outboxq_operator).

    Exit codes: 0 it was stopped; 2 wrong usage, also an address that others can reach without a way to log in.

    \b
    Examples:
      outboxq dashboard
      outboxq dashboard --role operator --environment production
      outboxq dashboard --database orders=postgresql://host/orders
      outboxq dashboard --role operator --read-url postgresql://standby/orders
      outboxq dashboard --hash-password anna --role operator
      outboxq dashboard --listen 0.0.0.0:8484 --users users.txt
    """
    try:
        from outboxq.dashboard.roles import role_named
    except ModuleNotFoundError as error:
        raise WrongUsage(str(error)) from error

    role = role_named(options.role)
    if options.hash_password is not None:
        _print_password_line(options.hash_password, role)
        return
    _serve(options, role)


def _print_password_line(name: str, role: "Role") -> None:
    from outboxq.dashboard.logins import password_line

    password = typer.prompt("Password", hide_input=True, confirmation_prompt=sys.stdin.isatty(), err=True)
    typer.echo(password_line(name, role, password))


def _serve(options: DashboardOptions, role: "Role") -> None:
    from outboxq.dashboard import TokenLogin, create_app
    from outboxq.dashboard.serving import announced, hosts_of, is_open, listen, serve
    from outboxq.handlers.loading import load_jobs
    from outboxq.observability.metrics.server import parse_address
    from outboxq.relay.signals import stop_signals

    host, port = parse_address(options.listen)
    auth = _auth(options, role)
    if auth is None and is_open(host):
        raise WrongUsage(
            f"others can reach {host}, and nothing asks who they are: set OUTBOXQ_DASHBOARD_TOKEN, or pass --users or "
            "--trusted-header; or listen on 127.0.0.1"
        )
    login = auth or TokenLogin(role=role)
    jobs = None if options.app is None else load_jobs(options.app)
    engines, replicas = _engines(options)
    try:
        app = create_app(
            engines,
            auth=login,
            jobs=jobs,
            read_engine=replicas,
            schema=options.schema,
            environment=options.environment,
            payloads=options.payloads,
            hosts=hosts_of(host, options.hosts or ()),
            origins=options.origins or (),
        )
        with listen(host, port) as (listening, address):
            typer.echo(announced(address, login), err=True)
            serve(app, listening, stop_signals)
    except OSError as error:
        raise CommandFailed(f"the dashboard cannot be served on {options.listen}: {error.strerror or error}") from error
    finally:
        for engine in (*engines.values(), *replicas.values()):
            engine.dispose()


def _auth(options: DashboardOptions, role: "Role") -> "TokenLogin | PasswordLogin | HeaderAuth | None":
    from outboxq import config
    from outboxq.dashboard import HeaderAuth, PasswordLogin, TokenLogin

    token = config.dashboard_token()
    ways = [name for name, value in (("--users", options.users), ("--trusted-header", options.header)) if value]
    if len(ways) + (token is not None) > 1:
        raise WrongUsage("there is one way to log in: OUTBOXQ_DASHBOARD_TOKEN, --users or --trusted-header")
    if options.users is not None:
        return PasswordLogin.from_file(options.users)
    if options.header is not None:
        if not options.proxies:
            raise WrongUsage("--trusted-header needs --trusted-proxy: from others the header is not believed")
        return HeaderAuth(options.header, options.proxies, role=role)
    return None if token is None else TokenLogin(token, role=role)


def _engines(options: DashboardOptions) -> "tuple[dict[str, Engine], dict[str, Engine]]":
    """Return the engines of the databases, and those of their replicas, both by the names of the databases."""
    from outboxq.cli.database import named_databases
    from outboxq.database.engines import make_engine

    named = named_databases(options.databases, options.database_url)
    replicas = replicas_of(named, options.read_url, options.databases or options.database_url)

    def engines(urls: "Mapping[str, URL]") -> "dict[str, Engine]":
        return {name: make_engine(url, application_name="outboxq dashboard", pooled=True) for name, url in urls.items()}

    return engines(named), engines(replicas)
