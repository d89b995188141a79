"""The demo with its dashboard: it can be looked at while it runs, and nothing is left of it."""

import re
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

from tests.support.waiting import wait_until

LIMIT_SECONDS = 60


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.wide
def test_the_demo_can_be_looked_at_and_ends_cleanly() -> None:
    """The link logs in, two relays work on what customers order, and Ctrl-C ends all of it."""
    command = [sys.executable, "-m", "outboxq", "demo", "--dashboard"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        try:
            link = next(found[0] for line in demo.stderr if (found := re.search(r"http://\S+/login\?token=\S+", line)))
            with httpx.Client(follow_redirects=True, timeout=LIMIT_SECONDS) as client:
                page = client.get(link)
                assert page.status_code == 200, page.text
                overview = f"{link.partition('/login')[0]}/market/"

                def looked() -> bool:
                    seen = client.get(overview, headers={"accept": "application/json"}).json()
                    alive = [relay for relay in seen["relays"] if relay["state"] == "serving"]
                    return len(alive) == 2 and sum(row["done"] for row in seen["history"]) > 5

                wait_until(looked, "two relays that have done something", 2 * LIMIT_SECONDS)
            children = psutil.Process(demo.pid).children(recursive=True)
            assert len(children) > 2
            demo.send_signal(signal.SIGINT)
            assert demo.wait(LIMIT_SECONDS) == 0, demo.stderr.read()
            assert "nothing is left" in demo.stderr.read()
            # What serves the others, as a server of forks, sees their end and then ends itself.
            wait_until(lambda: not any(runs(child) for child in children), "every child to end")
        finally:
            demo.kill()
