"""The files that `outboxq metrics --print` prints."""

import json
from importlib.resources import files

from outboxq.observability.metrics.board import dashboard as board


def rules() -> str:
    """Return the alert rules for Prometheus, as YAML."""
    return files("outboxq.observability.metrics").joinpath("rules.yml").read_text(encoding="utf-8")


def dashboard() -> str:
    """Return the dashboard for Grafana, as JSON."""
    return json.dumps(board(), indent=2) + "\n"
