"""The command line: `python -m benchmarks.peers install|run [PEER ...]`, from the root of the repository."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.bench import MeasurementFailed
from benchmarks.exactly_once import KILLED_JOBS
from benchmarks.peers.definitions import PEERS, Peer, Scenario
from benchmarks.peers.drivers import DriverFailed
from benchmarks.peers.environments import InstallFailed, default_directory, install, is_installed, not_installed
from benchmarks.peers.report import Finding, as_json, as_markdown, describe, spread
from benchmarks.peers.runs import LATENCY_JOBS, Bench, NotExecuted
from outboxq.postgres import Server, find_server, start_embedded

_PROCESSES = (1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; the exit code."""
    given = _parser().parse_args(arguments)
    peers = [PEERS[name] for name in given.peers] or list(PEERS.values())
    if given.command == "install":
        return _install(peers, given.directory)
    present = [peer for peer in peers if is_installed(peer, given.directory)]
    for peer in peers:
        if peer not in present:
            _say(f"{peer.name}: {not_installed(peer)}")
    return _run(present, given) if present else 0


def measure(bench: Bench, scenarios: Sequence[Scenario], repeats: int, jobs: int | None) -> Iterator[Finding]:
    """Run these scenarios of one peer.

    Args:
        repeats: Of each drain; the latency is one long run.
        jobs: Enqueued before each drain; None for the peer's own number.

    Raises:
        DriverFailed: a driver did.
        MeasurementFailed: processor time cannot be read here, or killed workers left jobs that were never finished.
        NotExecuted: a peer did not execute each job once.
    """
    peer = bench.peer
    for scenario in scenarios:
        if scenario is Scenario.latency:
            yield Finding(peer, scenario, 1, LATENCY_JOBS, latency=bench.latency(LATENCY_JOBS))
            continue
        if scenario is Scenario.kill:
            count = jobs or KILLED_JOBS
            yield Finding(peer, scenario, 1, count, effects=bench.effects_after_kills(count))
            continue
        count = jobs or peer.jobs[scenario]
        if scenario is Scenario.snapshot:
            rates = [bench.behind_a_snapshot(count) for _ in range(repeats)]
            yield Finding(peer, scenario, 1, count, jobs_per_second=spread(rates))
            continue
        if scenario is Scenario.orm:
            drained = [bench.drain_entities(count) for _ in range(repeats)]
            rate, cpu_us = (spread(values) for values in zip(*drained, strict=True))
            yield Finding(peer, scenario, 1, count, jobs_per_second=rate, cpu_us=cpu_us)
            continue
        for processes in _PROCESSES:
            rates = [bench.drain(scenario, count, processes) for _ in range(repeats)]
            yield Finding(peer, scenario, processes, count, jobs_per_second=spread(rates))


def _install(peers: Sequence[Peer], directory: Path) -> int:
    failed = 0
    for peer in {peer.package: peer for peer in peers}.values():
        try:
            _say(f"{peer.package} {peer.version}: {install(peer, directory)}")
        except InstallFailed as error:
            failed = 1
            _say(f"{peer.package}: {error}")
    return failed


def _run(peers: Sequence[Peer], given: argparse.Namespace) -> int:
    findings: list[Finding] = []
    failed = 0
    with _server(given.server) as server:
        _say(f"PostgreSQL {server.version}, {server.source}")
        for peer in peers:
            bench = Bench(peer, given.directory, server)
            scenarios = [scenario for scenario in peer.scenarios if scenario in (given.scenario or Scenario)]
            try:
                for finding in measure(bench, scenarios, given.repeats, given.jobs):
                    findings.append(finding)
                    _say(describe(finding))
                    _write(findings, given)
            except (DriverFailed, MeasurementFailed, NotExecuted, ValueError) as error:
                failed = 1
                _say(f"{peer.name}: {error}")
    return failed


def _write(findings: Sequence[Finding], given: argparse.Namespace) -> None:
    # After each finding, so that a run that is broken off leaves what it has.
    if given.json is not None:
        given.json.write_text(as_json(findings))
    if given.markdown is not None:
        given.markdown.write_text(as_markdown(findings))


def _server(url: str | None) -> Server:
    return start_embedded(durable=True) if url is None else find_server(configured_url=url, binaries=None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Other job queues, same work.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("install", "make the environments from nothing"), ("run", "measure what is installed")):
        command = commands.add_parser(name, help=text)
        command.add_argument("peers", nargs="*", metavar="PEER", choices=[*PEERS, []], help=", ".join(PEERS))
        command.add_argument("--directory", type=Path, default=default_directory(), help="of the environments")
    command.add_argument("--server", metavar="URL", help="a running server; without one an embedded one is started")
    command.add_argument("--scenario", type=Scenario, action="append", choices=list(Scenario), help="all without it")
    command.add_argument("--repeats", type=_positive, default=3)
    command.add_argument("--jobs", type=_positive, metavar="N", help="enqueued before each run")
    command.add_argument("--json", type=Path, metavar="FILE")
    command.add_argument("--markdown", type=Path, metavar="FILE")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
