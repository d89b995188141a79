"""The files in `deploy/` are what their programs read: each is given to a checker, and so is a copy with a mistake."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outboxq import RelayConfig
from tests.deploy.files import DEPLOY, NEEDED, PLACES, documents

# A supervisor kills the children that are left this long after they should have drained (docs/operating.md).
KILL_SECONDS = 20
KUBERNETES = "1.31"


def hadolint(path: Path) -> "subprocess.CompletedProcess[str]":
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(NEEDED)
    return subprocess.run([program, str(path)], capture_output=True, text=True, check=False)


def test_the_dockerfile_has_no_complaint_of_the_linter(tmp_path: Path) -> None:
    """hadolint finds nothing, and does find a command that a shell would run, which gets no SIGTERM."""
    done = hadolint(DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    copy = tmp_path / "Dockerfile"
    copy.write_text((DEPLOY / "Dockerfile").read_text() + "CMD outboxq relay shop.jobs:jobs\n")
    assert "DL3025" in hadolint(copy).stdout


def test_compose_yaml_is_of_the_compose_specification() -> None:
    """The specification's reader takes it; not one with a condition that there is not."""
    compose_spec = pytest.importorskip("compose_spec", reason=NEEDED)
    # Written anew, because its reader knows no merge keys.
    text = pytest.importorskip("yaml", reason=NEEDED).safe_dump(documents("compose.yaml")[0])
    compose_spec.PyCompose.from_yaml(text).validate()
    with pytest.raises(ValueError, match="service_ready"):
        compose_spec.PyCompose.from_yaml(text.replace("condition: service_healthy", "condition: service_ready"))


@pytest.mark.parametrize("name", ["kubernetes/migrate.yaml", "kubernetes/relay.yaml"])
def test_the_manifests_are_of_kubernetes_schemas(name: str) -> None:
    """Strictly: a field that there is not is an error, at any depth."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=NEEDED)
    for document in documents(name):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    workload = documents(name)[0]
    workload["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessprobe"):
        kubernetes_validate.validate(workload, KUBERNETES, strict=True)


def test_deployment_and_disruption_budget_mean_the_same_pods() -> None:
    """A selector with a slip selects nothing, and Kubernetes says nothing."""
    deployment, budget = documents("kubernetes/relay.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    for selector in (deployment["spec"]["selector"], budget["spec"]["selector"], spread["labelSelector"]):
        assert selector == {"matchLabels": labels}
    assert budget["spec"]["maxUnavailable"] < deployment["spec"]["replicas"]


@pytest.mark.parametrize("place", ["compose", "kubernetes", "systemd"])
def test_a_relay_is_given_more_time_to_stop_than_it_takes(place: str) -> None:
    """Its handlers have --drain-seconds, and a supervisor 20 s more before it kills what is left."""
    stop_seconds = PLACES[place]().stop_seconds
    assert stop_seconds is not None
    assert stop_seconds > RelayConfig().drain_seconds + KILL_SECONDS


def verify(unit: Path, program: Path, directory: Path) -> str:
    """What systemd says of the unit, with a program that there is on this machine."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    copy = directory / unit.name
    copy.write_text(unit.read_text().replace("/opt/shop/.venv/bin/outboxq", str(program)))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{done.returncode or ''}{done.stdout}{done.stderr}"


def test_systemd_has_no_complaint_of_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` says nothing, and does say something of a misspelt setting."""
    program = Path(sys.executable).parent / "outboxq"
    unit = DEPLOY / "outboxq-relay.service"
    assert verify(unit, program, tmp_path) == ""
    wrong = tmp_path / "wrong" / unit.name
    wrong.parent.mkdir()
    wrong.write_text(unit.read_text().replace("TimeoutStopSec", "TimeoutStopSeconds"))
    assert "TimeoutStopSeconds" in verify(wrong, program, tmp_path)
