"""A real Prometheus scrapes the exporter: relays that are killed raise the alert, and relays that start end it."""

import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outboxq.observability.metrics.shipped import rules
from outboxq.postgres import Database
from tests.support.cli import REPOSITORY, command, environment
from tests.support.ledger import enqueue
from tests.support.metrics import serving
from tests.support.waiting import PATIENCE, wait_until

TARGET = "tests.support.app:jobs"
ALERT = "OutboxqNoRelayAlive"
# A relay is dead after a minute, the exporter looks every 15 seconds, and the alert waits: on any machine within this.
WHOLE_SECONDS = 600.0


@contextmanager
def prometheus(directory: Path, targets: list[str]) -> Iterator[str]:
    """A Prometheus on a free port of this machine, with the rules as they are shipped, but for their patience."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    (directory / "outboxq.rules.yml").write_text(rules().replace("for: 2m", "for: 2s"))
    (directory / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": ["outboxq.rules.yml"],
                "scrape_configs": [{"job_name": "outboxq", "static_configs": [{"targets": targets}]}],
            }
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield address
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()


def asked(address: str, path: str) -> dict[str, object]:
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=PATIENCE) as answer:
            return json.load(answer)["data"]
    except OSError:
        return {}


def firing(address: str) -> bool:
    """Whether the alert fires now."""
    alerts = asked(address, "alerts").get("alerts", [])
    return any(each["labels"]["alertname"] == ALERT and each["state"] == "firing" for each in alerts)  # type: ignore[attr-defined]


def living(address: str) -> bool:
    """Whether Prometheus has seen a relay that serves."""
    found = asked(address, "query?query=outboxq_relays%7Bstate%3D%22serving%22%7D%3E0").get("result")
    return bool(found)


@contextmanager
def relay(url: str, log: Path) -> Iterator["subprocess.Popen[str]"]:
    with log.open("w") as said:
        process = subprocess.Popen(
            command("relay", TARGET), cwd=REPOSITORY, env=environment(url), stderr=said, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.wide
@pytest.mark.timeout(2 * WHOLE_SECONDS)
def test_killed_relays_raise_the_alert_and_new_ones_end_it(
    outboxq_database: Database, engine: Engine, tmp_path: Path
) -> None:
    """With the exporter's own pace. That the killed relay is silent for a minute is brought forward in its row."""
    url = outboxq_database.url
    with (
        serving("metrics", "--listen", "0", url=url, log=tmp_path / "exporter.log") as exporter,
        prometheus(tmp_path, [exporter.address]) as address,
    ):
        wait_until(lambda: asked(address, "status/buildinfo"), "Prometheus", WHOLE_SECONDS)
        with relay(url, tmp_path / "first.log") as first:
            enqueue(engine, ["a"], both_flavours=False)
            wait_until(lambda: living(address), "a relay that lives", WHOLE_SECONDS)
            wait_until(lambda: not firing(address), "no alert", WHOLE_SECONDS)
            first.send_signal(signal.SIGKILL)
            first.wait(PATIENCE)
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.relay_status SET seen_at = seen_at - interval '1 minute'"))
        wait_until(lambda: firing(address), f"{ALERT} fires", WHOLE_SECONDS)
        with relay(url, tmp_path / "second.log"):
            wait_until(lambda: not firing(address), f"{ALERT} is over", WHOLE_SECONDS)
            assert living(address)
