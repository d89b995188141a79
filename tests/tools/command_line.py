"""Write docs/command-line.md: the help of every command, and what it prints on a terminal of 80 columns."""

import argparse
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from difflib import unified_diff
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

from sqlalchemy import Engine, create_engine, text

from outboxq.cli.app import app
from outboxq.migrations.runner import migrate
from outboxq.postgres import start_embedded
from tests.support.cli import REPOSITORY, call
from tests.support.staged import numbered, stage
from tests.support.terminal import run_at_terminal

PAGE = REPOSITORY / "docs" / "command-line.md"
COLUMNS = 80

_HELP = """\
examples:
  python -m tests.tools.command_line            # write the page
  python -m tests.tools.command_line --check    # end with 1 if the page is not what would be written

The samples come from a database that is filled for this, on a server that is started for this. Times, process ids and
ids that are drawn at random are replaced by fixed ones."""

_INTRODUCTION = """\
# The command line

Look up a command: its help, and what it prints on a terminal of 80 columns. `python -m tests.tools.command_line` writes
this page.

- **A terminal** gets tables that fit it: columns without any value are left out, a wider terminal shows more, and
  `--wide` shows all. Ids are never cut. Times are ages: `3 m` ago, `in 5 m`. Headings are the keys of the JSON without
  `_at` and `_seconds`. Colours mark states that need a look, unless `NO_COLOR` is set.
- **A pipe** gets a line for each row, tabs between columns, and every value in full: `outboxq jobs list | cut -f 1`
  prints ids.
- **`--json`** prints one JSON document on standard output, and errors and notices as JSON on standard error, an object
  a line: `{"error": "...", "type": "JobNotFound", "exit_code": 1}`, `{"notice": "..."}`.
- **Times** in full are UTC in the form of RFC 3339: `2026-01-31T12:00:00.123456Z`.
- **Logs** of `outboxq relay` are lines of text, or with `--log-format json` an object a line: `timestamp`, `level`,
  `logger`, `process`, `message`, `event` (a class of `outboxq.events`), `fields`, `traceback`, and `trace_id` if the
  job has a W3C `traceparent` among its headers. Records of the application, and of `ctx.log`, have the same form, with
  their `extra` in `fields`.
- **Exit codes**: 0 done; 1 something failed, or was not found; 2 wrong usage. [Relays have two
  more](operating.md#exit-codes), 3 and 4.
- **Completion** for your shell: `outboxq --install-completion`.

## All commands

"""

_COMMON_OPTIONS = """
## Common options

`--help` of a command shows these too; the sections below leave them out.

"""

# Options that mean the same wherever a command has them: listed once.
_COMMON = ("--database-url", "--schema", "--json", "--wide", "--because", "--read-url", "--help")

_APPLICATION = """\
from outboxq import Backoff, Context, Jobs

jobs = Jobs()


@jobs.handler(queue="accounts")
def credit(ctx: Context, account: int, cents: int) -> None: ...


@jobs.handler(queue="accounts", retry=Backoff(max_attempts=3))
def charge(ctx: Context, account: int, cents: int) -> None:
    raise ValueError("refused by the bank")
"""

# The time that a staged database is shown to have been filled at.
_STAGED_AT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z")
# The month of a schedule that is shown: its times are no ages.
_NEAR_A_CHANGE = "2030-03"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# From where the cursor is hidden to where the line is erased again.
_SPINNER = re.compile(r"\x1b\[\?25l.*?\x1b\[\?25h.*?\x1b\[2K", re.DOTALL)
_CODES = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = (
    (re.compile(r"(?<= )\[\d+\](?= )"), "[4711]"),
    (re.compile(r'(?<="process":)\d+'), "4711"),
    (re.compile(r"(?<= seconds=)[\d.e+-]+"), "0.012"),
    (re.compile(r"(?<= waited_seconds=)[\d.e+-]+"), "0.25"),
    (re.compile(r'(?<="seconds":)[\d.e-]+'), "0.012"),
    (re.compile(r'(?<="waited_seconds":)[\d.e-]+'), "0.25"),
)

SAMPLES: dict[str, Sequence[tuple[object, ...]]] = {
    "migrate": [()],
    "roles": [()],
    "relay": [("myapp.jobs:jobs", "--drain"), ("myapp.jobs:jobs", "--drain", "--log-format", "json")],
    "health": [("relay.json",)],
    "metrics": [("--once", "--database", "shop=postgresql://127.0.0.1:1/shop")],
    "dashboard": [("--listen", "0.0.0.0:8484")],
    "top": [("--once",)],
    "stats": [(), ("--wide",)],
    "history": [("--by", "kind", "--since", "24h")],
    "relays list": [("--json",)],
    "doctor": [()],
    "explain": [(numbered(4),), ("--queue", "mail"), (numbered(9),)],
    "queues list": [()],
    "jobs list": [(), ("--state", "scheduled", "--json"), ("--queue", "nosuch")],
    "jobs show": [(numbered(4),), (numbered(9), "--json")],
    "jobs watch": [(numbered(101),), ("--queue", "accounts", "--timeout", "0")],
    "dead list": [()],
    "dead show": [(numbered(101),)],
    "done list": [(), ("--outcome", "discarded", "--json")],
    "done show": [(numbered(302),)],
    "inbox list": [()],
    "inbox show": [("payments", "evt_1Nq2")],
    "effects list": [()],
    "effects show": [("stripe-charge", "order-1002")],
    "schedules list": [()],
    "schedules show": [("nightly",)],
    "batches list": [()],
    "batches show": [(numbered(201),)],
    "audit list": [(), ("--action", "queue", "--json")],
    "audit show": [(numbered(301),)],
    "audit prune": [("--older-than", "400d")],
    "bulk resume": [(numbered(301), "--because", "reviewed")],
    "bulk stop": [(numbered(301),), (numbered(302),)],
    "kinds list": [()],
    "queues pause": [("accounts", "mail")],
    "queues resume": [("accounts", "mail")],
    "queues set": [("mail", "--limit", "5", "--rate", "100/min", "--burst", "20")],
    "schedules put": [
        ("cleanup", "--kind", "clean_up", "--queue", "upkeep", "--cron", "@hourly"),
        ("cleanup", "--kind", "clean_up", "--cron", "0 0 6 * * 1"),
    ],
    "schedules pause": [("report-7", "no-such")],
    "schedules resume": [("nightly",)],
    "schedules run-now": [("nightly",)],
    "schedules adopt": [("nightly", "--owner", "myapp.jobs:jobs")],
    "schedules remove": [("report-7", "--json")],
    "kinds pause": [("send_welcome", "--queue", "mail")],
    "kinds resume": [("send_welcome", "--queue", "mail")],
    "jobs cancel": [
        (numbered(1), numbered(9)),
        ("--queue", "mail", "--dry-run"),
        (numbered(1), numbered(4), "--running", "--wait", "0"),
    ],
    "jobs change": [("--queue", "mail", "--run-now", "--json"), (numbered(4), "--args", "{}")],
    "dead retry": [("--queue", "accounts")],
    "dead discard": [("--kind", "send", "--json")],
    "done run-again": [(numbered(302),), (numbered(301),)],
    "inbox forget": [("payments", "evt_1Nq2", "evt_9")],
    "effects resolve": [("stripe-charge", "order-1002", "--not-applied")],
    "effects new-installation": [("--yes",)],
}
# Run by tests, and not on the page: another page has the like, or the help says as much.
_NOT_SHOWN = {
    ("roles",),
    ("metrics", "--once", "--database", "shop=postgresql://127.0.0.1:1/shop"),
    ("dashboard", "--listen", "0.0.0.0:8484"),
    ("stats", "--wide"),
    ("doctor",),
    ("explain", numbered(9)),
    ("jobs list", "--state", "scheduled", "--json"),
    ("done list", "--outcome", "discarded", "--json"),
    ("audit list", "--action", "queue", "--json"),
    ("schedules put", "cleanup", "--kind", "clean_up", "--cron", "0 0 6 * * 1"),
    ("jobs change", "--queue", "mail", "--run-now", "--json"),
}

_HISTORY = f"""\
INSERT INTO outboxq.stat (grain, at, queue, kind, done, retried, died, wait_seconds, run_seconds, wait, run) VALUES
(60, now() - interval '5 minutes', 'accounts', 'charge', 1200, 14, 1, 9, 60,
  '{{0,0,100,1000,100,15{",0" * 14}}}', '{{0,0,0,0,200,1000,15{",0" * 13}}}'),
(60, now() - interval '3 minutes', 'mail', 'send_welcome', 310, 0, 0, 5, 90,
  '{{0,0,10,200,100{",0" * 15}}}', '{{0,0,0,0,0,10,250,50{",0" * 12}}}')"""
_RELAY = """\
INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, started_at, seen_at, state, queues, kinds, slots,
  busy, listens, running, flush) VALUES
('01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d11', 'worker-1', 4711, '0.1.0', 11,
  CAST(:at AS timestamptz) - interval '1 hour', :at, 'serving',
  '{accounts,mail}', '{charge,send_welcome}', 4, 1, true, '[{"id": "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d12", "queue":
  "accounts", "kind": "charge", "attempt": 1, "seconds": 4.2, "pid": 812}]', 240)"""

_AUDIT = f"""\
INSERT INTO outboxq.audit (id, at, finished_at, actor, role, via, db_user, action, target, filter, reason, expected,
  changed, held, position) VALUES
('{numbered(302)}', CAST(:at AS timestamptz) - interval '1 hour', CAST(:at AS timestamptz) - interval '1 hour', 'bob',
  NULL, 'cli', 'ops', 'queue.pause', 'mail', NULL, 'the mail server is down', NULL, 1, 0, NULL),
('{numbered(301)}', CAST(:at AS timestamptz) - interval '5 minutes', NULL, 'anna', 'admin', 'web', 'dashboard',
  'dead.discard', NULL, '{{"queue": "accounts", "died_before": "2100-01-31T11:54:58Z"}}', 'the bank has told them',
  31250, 31000, 12, '{numbered(5)}')"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it; 1 if it is not current."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.command_line",
        description=__doc__,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    written = page()
    if not options.check:
        PAGE.write_text(written)
        return 0
    found = PAGE.read_text()
    if found != written:
        print(f"{PAGE.relative_to(REPOSITORY)} is not current: python -m tests.tools.command_line", file=sys.stderr)
        differences = unified_diff(found.splitlines(), written.splitlines(), "found", "expected", n=1, lineterm="")
        print("\n".join(differences), file=sys.stderr)
        return 1
    return 0


def sections() -> dict[str, Sequence[str]]:
    """The commands by the headings of `outboxq --help`."""
    return dict(app.info.cls.sections)


def page() -> str:
    """The page as it should be."""
    helps = {name: _help_of(name) for names in sections().values() for name in names}
    with _prepared() as (url, engine, directory):
        sampler = _Sampler(url, engine, directory)
        parts = [_INTRODUCTION, _all_commands(), _COMMON_OPTIONS, _common_options(helps)]
        for heading, names in sections().items():
            parts.append(f"\n## {heading}\n")
            for name in names:
                parts += [f"\n### outboxq {name}\n", f"\n```text\n{_own_help(helps[name])}\n```\n"]
                parts += sampler.samples_of(name)
    return "\n".join("".join(parts).splitlines()) + "\n"


def _all_commands() -> str:
    """A table of links, by the headings of `outboxq --help`."""
    rows = []
    for heading, names in sections().items():
        links = ", ".join(f"[{name}](#outboxq-{name.replace(' ', '-')})" for name in names)
        rows.append(f"| [{heading}](#{heading.lower()}) | {links} |\n")
    return "| Purpose | Commands |\n|---|---|\n" + "".join(rows)


def _common_options(helps: Mapping[str, str]) -> str:
    """A table of the options that the help of the commands leaves out on this page."""
    commands: dict[tuple[str, str], list[str]] = {}
    for name, printed in helps.items():
        for option, meaning in _options_of(printed):
            if _is_common(option):
                commands.setdefault((option, meaning), []).append(name)
    rows = [
        f"| `{option}` | {meaning} | {_named(names, helps)} |\n"
        for (option, meaning), names in sorted(commands.items(), key=lambda each: -len(each[1]))
        if not option.endswith("--help")
    ]
    return "| Option | Meaning | Commands |\n|---|---|---|\n" + "".join(rows)


def _named(names: Sequence[str], every: Collection[str]) -> str:
    for heading, under in sections().items():
        if names == list(under):
            return f"all under [{heading}](#{heading.lower()})"
    others = [name for name in every if name not in names]
    if len(others) < len(names):
        return "all but " + ", ".join(f"`{name}`" for name in others)
    return ", ".join(f"`{name}`" for name in names)


def _own_help(printed: str) -> str:
    """The help of a command without common options, and without its usage if that says only that it has options."""
    usage, _, described = printed.partition("Options:\n")[0].partition("\n\n")
    usage = usage.removeprefix("Usage: ").replace(" [OPTIONS]", "")
    text, heading, arguments = described.partition("Arguments:\n")
    own = "".join(entry for entry in _entries(printed) if not _is_common(entry))
    parts = [
        usage if arguments else "",
        textwrap.dedent(text),
        heading + arguments,
        f"Options:\n{own}" if own else "",
    ]
    return "\n\n".join(part.rstrip() for part in parts if part)


def _entries(printed: str) -> list[str]:
    """The options of a help as they are printed there."""
    return re.split(r"^(?=  -)", printed.partition("\nOptions:\n")[2], flags=re.MULTILINE)[1:]


def _options_of(printed: str) -> Iterator[tuple[str, str]]:
    """The options of a help with their meanings."""
    for entry in _entries(printed):
        option, _, meaning = " ".join(re.sub(r"^(  \S.*?)(?=  |\n)", r"\1\0", entry, count=1).split()).partition("\0")
        yield option.strip(), meaning.strip()


def _is_common(option: str) -> bool:
    return any(word.rstrip(",") in _COMMON for word in option.split()[:2])


def _block(command: str, printed: str) -> str:
    return f"\n```text\n$ {command}\n{printed.rstrip()}\n```\n"


def _help_of(name: str) -> str:
    with patch.dict("os.environ", {"COLUMNS": str(COLUMNS)}):
        return call(*name.split(), "--help").ok().stdout


@contextmanager
def _prepared() -> Iterator[tuple[str, Engine, Path]]:
    """A database of its own with the tables, and a directory with an application."""
    with (
        start_embedded(durable=True) as server,
        server.create_database() as database,
        tempfile.TemporaryDirectory(prefix="outboxq-") as name,
    ):
        directory = Path(name) / "app"
        (directory / "myapp").mkdir(parents=True)
        (directory / "myapp" / "jobs.py").write_text(_APPLICATION)
        engine = create_engine(database.url)
        with engine.begin() as connection:
            migrate(connection)
        yield database.url, engine, directory
        engine.dispose()


class _Sampler:
    """Runs commands on the database, each time filled anew."""

    def __init__(self, url: str, engine: Engine, directory: Path) -> None:
        self._url, self._engine, self._directory = url, engine, directory

    def samples_of(self, name: str) -> list[str]:
        """A block for each sample."""
        return [self._sample(name, words) for words in SAMPLES.get(name, ()) if (name, *words) not in _NOT_SHOWN]

    def _sample(self, name: str, words: Sequence[object]) -> str:
        staged_at = stage(self._engine)
        self._stage_for(name, staged_at)
        said = run_at_terminal(
            *name.split(), *words, columns=COLUMNS, url=self._url, cwd=self._directory, with_errors=True
        )
        printed = _CODES.sub("", _SPINNER.sub("", said.stdout))
        shown = " ".join(map(str, ("outboxq", name, *words)))
        ended = f"\n[exit code {said.exit_code}]" if said.exit_code else ""
        return _block(shown, self._fixed(printed.rstrip() + ended, staged_at))

    def _stage_for(self, name: str, staged_at: datetime) -> None:
        """What a command needs besides."""
        with self._engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.paused_kind"))
            if name in ("kinds list", "kinds resume"):
                paused = "INSERT INTO outboxq.paused_kind VALUES ('mail', 'send_welcome', now() - interval '5 minutes')"
                connection.execute(text(paused))
            if name == "effects new-installation":
                connection.execute(text("DELETE FROM outboxq.relay"))
            connection.execute(text("DELETE FROM outboxq.stat"))
            connection.execute(text("DELETE FROM outboxq.relay_status"))
            if name == "history":
                connection.execute(text(_HISTORY))
            connection.execute(text("DELETE FROM outboxq.audit"))
            if name.startswith(("audit", "bulk")):
                connection.execute(text(_AUDIT), {"at": staged_at})
            if name in ("top", "relays list"):
                connection.execute(text(_RELAY), {"at": staged_at})
            if name == "relay":
                connection.execute(text("DELETE FROM outboxq.job WHERE queue = 'mail' OR parked > 0"))
                # The relay would find it over beside its jobs, before them or behind them.
                connection.execute(text("DELETE FROM outboxq.batch"))
            if name == "schedules show":
                connection.execute(text(f"UPDATE outboxq.schedule SET next_at = '{_NEAR_A_CHANGE}-30T01:30:00Z'"))
        if name == "health":
            at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            health = {"state": "serving", "processes": 2, "running": 2, "pid": 7, "at": at}
            (self._directory / "relay.json").write_text(json.dumps(health))

    def _fixed(self, printed: str, staged_at: datetime) -> str:
        """The same with a fixed directory, fixed times and fixed process ids, and ids that are not random."""
        printed = printed.replace(str(self._directory.parent), "/srv")
        printed = _TIME.sub(lambda found: _fixed_time(found[0], staged_at), printed)
        for process, fixed in _PROCESS:
            printed = process.sub(fixed, printed)
        known: dict[str, str] = {}
        return _UUID.sub(lambda found: _fixed_id(found[0], known), printed)


def _fixed_time(written: str, staged_at: datetime) -> str:
    if written.startswith(_NEAR_A_CHANGE):
        return written
    since = datetime.fromisoformat(written) - staged_at
    # What is not a whole second away was not staged: it is the time at which the command ran.
    moment = _STAGED_AT + (since if since.microseconds == 0 else timedelta(seconds=1))
    digits = len(written.partition(".")[2]) - 1
    return moment.isoformat(timespec="milliseconds" if digits == 3 else "microseconds").replace("+00:00", "Z")


def _fixed_id(found: str, known: dict[str, str]) -> str:
    staged = str(numbered(0))[:23]
    if found.startswith(staged):
        return found
    return known.setdefault(found, str(UUID(f"7d1f0c52-93b6-4e0a-8c11-{len(known) + 1:012x}")))


if __name__ == "__main__":
    sys.exit(main())
