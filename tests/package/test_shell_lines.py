"""The shell lines of the documents: each is run by a test, or says why it is not."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outboxq.postgres import Database
from tests.package.test_readme import shell_environment
from tests.support.pages import PAGES, README, ROOT, blocks, write_application
from tests.support.readme import read_steps

SHELL = ("bash", "console", "sh", "shell")
INSTALLS = "it installs packages; what it makes is the environment that the tests run in"
DOCKER = "it needs a Docker engine; tests/deploy checks the files"
SYSTEMD = "it changes the machine; tests/deploy checks the unit"
CLUSTER = "it needs a Kubernetes cluster; tests/deploy checks the manifests"
A_DASHBOARD_OF_YOURS = "it asks a dashboard of yours; tests/dashboard/test_actions.py does the same"
SERVER_OF_YOURS = "it names a server of the reader's"

# Those of whole documents, in the blocks that are marked `console`.
CONSOLE_RUN_BY = {
    "docs/ten-minutes.md": "tests.package.test_readme:test_the_application_of_ten_minutes_works_as_it_is_printed"
}
# The pg_dump and pg_restore lines, and what follows them.
DUMPS = "tests.migrations.test_dump_restore:test_a_whole_dump_moves_an_installation"

# Lines that are run here, beside the application of ten minutes, and how they may end.
RUN_HERE = {
    "outboxq doctor": (0, 1),
    "outboxq doctor myapp.jobs:jobs --older-than 60": (0, 1),
    "outboxq explain 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10": (1,),
    "outboxq explain --queue mail": (0,),
    "outboxq dead list": (0,),
    "outboxq schedules list": (0,),
    "outboxq history": (0,),
    "outboxq top --once --json": (0,),
    "outboxq jobs watch --queue mail": (0,),
    "outboxq stats": (0,),
    "outboxq history --by kind --since 24h": (0,),
    "outboxq history --queue mail --by hour --since 7d": (0,),
    "outboxq relays list": (0,),
    "outboxq metrics --print rules > outboxq.rules.yml": (0,),
    "outboxq metrics --print dashboard > outboxq.json": (0,),
    "outboxq schedules show nightly": (1,),
    "outboxq schedules pause nightly": (1,),
    "outboxq schedules resume nightly": (1,),
    "outboxq schedules run-now nightly": (1,),
    "outboxq schedules put cleanup --kind clean_up --queue upkeep --cron @hourly": (0,),
    "outboxq schedules remove cleanup": (0, 1),
    "outboxq dead show 01890a5d-ac96-774b-bcce-b302099a8057": (1,),
    "outboxq dead retry --queue prices": (0,),
    "outboxq dead retry --queue accounts --because 'the bank is back'": (0,),
    "outboxq audit list": (0,),
    "outboxq audit list --action dead --since 2026-01-31": (0,),
    "outboxq audit show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10": (1,),
    "outboxq audit prune --older-than 400d": (0,),
    "outboxq bulk stop 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10": (1,),
    "outboxq bulk resume 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10": (1,),
    "outboxq queues set prices --keep-dead 30d": (0,),
    "outboxq dead discard 01890a5d-ac96-774b-bcce-b302099a8057": (1,),
    "outboxq effects list --status unknown": (0,),
    "outboxq effects resolve 'POST /orders' 'user:7 8e03978e-40d5-43e8-bc93-6894a57f9324' --not-applied": (1,),
    "outboxq effects resolve 'POST /orders' 'user:7 8e03978e-40d5-43e8-bc93-6894a57f9324' --applied": (1,),
    "outboxq jobs list --kind write_invoice": (0,),
    "outboxq jobs cancel 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10": (1,),
    "outboxq jobs cancel 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10 --running": (1,),
    "outboxq jobs cancel --queue reports --running --dead-letter": (0,),
    "outboxq jobs change 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10 --run-now": (1,),
    "outboxq jobs change --queue mail --kind send_welcome --priority 10": (0,),
    "outboxq jobs change --queue mail --run-at 2030-01-31T08:00:00+01:00": (0,),
    "outboxq jobs change 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10 --args '{\"user_id\": 7}' --app myapp.jobs:jobs": (1,),
    "outboxq kinds pause send_welcome --queue mail": (0,),
    "outboxq kinds list": (0,),
    "outboxq queues set mail --limit 5 --rate 100/min --burst 20": (0,),
    "outboxq kinds resume send_welcome --queue mail": (0,),
    "outboxq jobs list --group account-7": (0,),
    "outboxq jobs list --state grouped": (0,),
    "python -m benchmarks --list": (0,),
}
# Lines that no test runs, and why.
SERVES = "it serves until it is stopped; tests/relay/test_several_databases.py runs such lines"
NOT_RUN = {
    'OUTBOXQ_DATABASE_URL="$SHARD_A $SHARD_B" outboxq relay myapp.jobs:jobs --processes 2': SERVES,
    'outboxq relay myapp.jobs:jobs --database-url "$SHARD_A" --database-url "$SHARD_B"': SERVES,
    "python3 -m venv .venv && .venv/bin/pip install -e '.[demo]' && .venv/bin/outboxq demo": INSTALLS
    + "; the demo is run by tests/demo",
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest": "it is what runs the tests",
    "python3 -m venv .venv && . .venv/bin/activate": INSTALLS,
    "pip install 'outboxq[cli]'": INSTALLS,
    "pip install 'outboxq[otel]' opentelemetry-sdk": INSTALLS,
    "export OUTBOXQ_DATABASE_URL=postgresql://ops@primary/shop": SERVER_OF_YOURS,
    "export OUTBOXQ_READ_URL=postgresql://ops@standby/shop": SERVER_OF_YOURS,
    "outboxq dashboard --role operator": "it serves until it is stopped; tests/dashboard/test_command.py runs it",
    "createdb first": "a test has a database of its own",
    "createdb shop": "a test has a database of its own",
    "export OUTBOXQ_DATABASE_URL=postgresql+psycopg://localhost/first": "a test's database has another URL",
    "outboxq migrate && python first.py": "tests/package/test_readme.py runs it",
    "export SHOP_DATABASE_URL=postgresql+psycopg://localhost/shop": "a test's database has another URL",
    "export OUTBOXQ_DATABASE_URL=$SHOP_DATABASE_URL": "a test's database has another URL",
    "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]'": INSTALLS,
    ".ci/run": "it runs the tests",
    ".venv/bin/pytest -n 0 tests/execution/test_claim.py -k stale": "it runs tests",
    ".venv/bin/pytest tests/relay": "it runs tests",
    "OUTBOXQ_TEST_DATABASE_URL=postgresql://me@localhost/postgres .venv/bin/pytest": SERVER_OF_YOURS,
    ".venv/bin/mkdocs build --strict --site-dir /tmp/site": "tests/package/test_site.py builds the site",
    ".venv/bin/mkdocs serve": "it serves until Ctrl-C what tests/package/test_site.py builds",
    "python -m benchmarks.peers install": "it installs other queues",
    "python -m benchmarks.peers run --json peers.json --markdown peers.md": "it needs other queues, and half an hour",
    "python -m benchmarks": "nine minutes; tests/benchmarks runs each scenario in a tiny size",
    "python -m benchmarks noop one": "tests/benchmarks runs each scenario in a tiny size",
    "python -m benchmarks --json found.json --markdown found.md --svg plots": "nine minutes, as above",
    "python -m benchmarks --server postgresql://me@host/postgres": SERVER_OF_YOURS,
    "outboxq doctor --json | jq -r '.findings[] | select(.severity == \"problem\") | .code'": "it needs jq",
    "outboxq explain --queue mail --json | jq -r '.reasons[0].code'": "it needs jq",
    "outboxq doctor --schema shop --json | jq -r '.findings[] | select(.code == \"function-different\").detail.sql'"
    " | psql mydb": "it needs jq and psql; tests/doctor runs the SQL that it prints",
    "DATABASE_PASSWORD=... docker compose --file deploy/compose.yaml up": DOCKER,
    "docker build --file deploy/Dockerfile --tag shop .": DOCKER,
    "docker run --init --stop-timeout 60 --env OUTBOXQ_DATABASE_URL shop": DOCKER,
    "export OUTBOXQ_DATABASE_URL='postgresql://relay@pooler:6432/shop?prepare_threshold=none'": SERVER_OF_YOURS,
    "export OUTBOXQ_LISTEN_URL='postgresql://relay@database:5432/shop'": SERVER_OF_YOURS,
    "install -m 0644 deploy/outboxq-relay.service /etc/systemd/system/": SYSTEMD,
    "systemctl daemon-reload && systemctl enable --now outboxq-relay": SYSTEMD,
    "journalctl --unit outboxq-relay --follow": SYSTEMD,
    "kubectl apply --filename deploy/kubernetes/migrate.yaml": CLUSTER,
    "kubectl apply --filename deploy/kubernetes/relay.yaml": CLUSTER,
    "kubectl create secret generic shop-database --from-literal=url=postgresql://relay:...@db/shop": CLUSTER,
    "kubectl create secret generic shop-database-owner --from-literal=url=postgresql://owner:...@db/shop": CLUSTER,
    "kubectl wait --for=condition=complete --timeout=10m job/shop-migrate": CLUSTER,
    "pip install 'outboxq[metrics]'": INSTALLS,
    "outboxq relay myapp.jobs:jobs --metrics 0.0.0.0:9464": "it serves until Ctrl-C, on every address of the machine; "
    "tests/observability serves on one",
    "outboxq metrics --listen 0.0.0.0:9465": "it serves until Ctrl-C, on every address of the machine; "
    "tests/observability serves on one",
    "pip install 'outboxq[dashboard]'": INSTALLS,
    "outboxq dashboard": "it serves until Ctrl-C; tests/dashboard/test_command.py serves it",
    "outboxq demo --dashboard": "it serves until Ctrl-C; tests/demo/test_market.py looks at it",
    "curl -c jar -b jar https://ops.example.com/token": A_DASHBOARD_OF_YOURS,
    "curl -c jar -b jar -H 'Accept: application/json' -H 'Origin: https://ops.example.com' -H \"X-CSRF-Token: $TOKEN\" "
    "-d 'reason=the provider is down' https://ops.example.com/orders/queues/mail/pause": A_DASHBOARD_OF_YOURS,
    "outboxq dashboard --hash-password anna --role operator >> users.txt": "it asks for a password at a terminal",
    "outboxq dashboard --listen 0.0.0.0:8484 --host-name ops.example.com --users users.txt": "it serves until Ctrl-C, "
    "on every address of the machine",
    "pip install 'outboxq[top]'": INSTALLS,
    "outboxq top": "it works until q is pressed; tests/cli/test_top.py presses keys",
    "outboxq top --plain --every 10": "it works until Ctrl-C",
    'outboxq jobs watch "$JOB_ID" --timeout 60 && echo "done"': "it names a job of the reader's",
    "outboxq relay shop.jobs:jobs": "it works until Ctrl-C, for an application of the reader's",
    "outboxq migrate --database-url postgresql://localhost/shop": SERVER_OF_YOURS,
    "outboxq migrate --sql | psql -v ON_ERROR_STOP=1 shop": "it needs psql; tests/migrations runs the SQL",
    "outboxq migrate && outboxq roles --sql | psql -v ON_ERROR_STOP=1 mydb": "it needs psql; tests/admin runs the SQL",
    "outboxq relay myapp.jobs:everything": "the registry is a part of an example; it would work until Ctrl-C",
    "outboxq relay myapp.jobs:jobs --queue urgent,normal=4 --queue '*=2' --processes 2": "it works until Ctrl-C, on"
    " queues that the application does not have",
    "python -m tests.fuzz --minutes 60 --seed 1": "an hour",
    "python -m tests.fuzz --mode savepoints": "it goes on for minutes; tests/fuzz runs a part of it",
    "python -m tests.fuzz --plant all": "it takes minutes; tests/fuzz plants three of them",
    "outboxq torture --jobs 5000 --faults 50 --seed 1": "minutes; tests/faults/test_torture.py runs smaller ones",
}


def lines_of(document: Path) -> Iterator[str]:
    """The shell lines of a document: without comments, and continued lines as one."""
    for block in blocks(document):
        if block.language not in SHELL:
            continue
        if block.language == "console":
            if name_of(document) not in CONSOLE_RUN_BY and "examples/" not in name_of(document):
                yield from (step.command for step in read_steps(f"```console\n{block.text}```\n"))
            continue
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
            code = re.sub(r"\s+#.*", "", line).strip()
            if code and not code.startswith("#"):
                yield code


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]
LINES = {line: name_of(document) for document in DOCUMENTS for line in lines_of(document)}


def runs_dump(line: str) -> bool:
    return LINES[line] == "docs/operating.md" and line.startswith(("pg_", "outboxq effects new-installation"))


@pytest.mark.parametrize("line", sorted(LINES))
def test_every_line_is_run_or_says_why_not(line: str) -> None:
    """A new line in a document joins one of the lists."""
    assert runs_dump(line) or line in RUN_HERE or line in NOT_RUN, f"{line!r} in {LINES[line]} is in no list"


def test_the_lists_name_nothing_else() -> None:
    """A line that left the documents leaves the lists."""
    assert sorted({*RUN_HERE, *NOT_RUN} - set(LINES)) == []


@pytest.mark.parametrize("named", [DUMPS, *CONSOLE_RUN_BY.values()])
def test_the_tests_that_run_lines_are_there(named: str) -> None:
    """A test that is said to run lines exists."""
    module, _, test = named.partition(":")
    assert hasattr(importlib.import_module(module), test)


@pytest.mark.large
@pytest.mark.parametrize("line", RUN_HERE)
def test_a_line_runs(line: str, outboxq_database: Database, tmp_path: Path) -> None:
    """It is understood: it ends as the document means it, and never as a wrong call (2)."""
    write_application(tmp_path)
    environment = {**shell_environment(outboxq_database), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    program, *words = shlex.split(line)
    # A shell of its own is for what needs one; of the others the shell makes the same words.
    command = (
        ["bash", "-c", line] if program != "outboxq" or ">" in words else [sys.executable, "-m", "outboxq", *words]
    )
    # What a line writes is not written into the checkout.
    place = tmp_path if ">" in words else ROOT
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode in RUN_HERE[line], f"{done.stdout}\n{done.stderr}"
