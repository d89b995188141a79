"""What the files in `deploy/` say: the command of each relay, its probe, and how long it is given to stop."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
NEEDED = "the checkers of deployment files come with: pip install -e '.[dev]'"


def documents(name: str) -> list[Any]:
    """The documents of a YAML file."""
    yaml = pytest.importorskip("yaml", reason=NEEDED)
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@dataclass(frozen=True)
class Deployed:
    """A relay as one of the files starts it; `stop_seconds` is how long it is given after SIGTERM."""

    command: list[str]
    probe: list[str] | None
    stop_seconds: float | None


def in_docker() -> Deployed:
    text = (DEPLOY / "Dockerfile").read_text()
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    (probe,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    return Deployed(json.loads(command), json.loads(probe), None)


def in_compose() -> Deployed:
    (compose,) = documents("compose.yaml")
    relay = compose["services"]["relay"]
    return Deployed(relay["command"], in_docker().probe, float(relay["stop_grace_period"].removesuffix("s")))


def in_kubernetes() -> Deployed:
    deployment, _ = documents("kubernetes/relay.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["livenessProbe"]["exec"]["command"]
    assert container["startupProbe"]["exec"]["command"] == probe
    return Deployed(container["command"], probe, pod["terminationGracePeriodSeconds"])


def in_systemd() -> Deployed:
    settings = dict(
        line.split("=", 1)
        for line in (DEPLOY / "outboxq-relay.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    program, *arguments = shlex.split(settings["ExecStart"])
    return Deployed([Path(program).name, *arguments], None, float(settings["TimeoutStopSec"]))


PLACES: dict[str, Callable[[], Deployed]] = {
    "docker": in_docker,
    "compose": in_compose,
    "kubernetes": in_kubernetes,
    "systemd": in_systemd,
}
