"""`python -m benchmarks`: measure, and say what was found."""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.bench import DEFAULT, FULL, QUICK, Bench, MeasurementFailed, say_on_stderr, start_server
from benchmarks.figures import Run, Unsupported
from benchmarks.peers_figures import Peers
from benchmarks.pgbench import PgbenchFailed, find_pgbench
from benchmarks.report import as_json, as_markdown
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.scenarios.throughput import UPDATE_LIMIT, measure_limit
from benchmarks.svg import write_plots
from outboxq.errors import OutboxqError

_ROOT = Path(__file__).parent.parent
# The other queues' scenario that each scenario of outboxq is compared with.
_OF_PEERS = {"peers": ("noop", "update", "orm", "kill"), "latency": ("latency",), "large": ("noop", "snapshot")}
# What cannot be measured costs its own line, and no other.
_EXPECTED = (MeasurementFailed, PgbenchFailed, OutboxqError, subprocess.SubprocessError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios that were chosen; 0 if all could be measured, whether their ratios meet the targets or not."""
    options = _parser().parse_args(arguments)
    if options.list:
        sys.stdout.write("".join(f"{each.number:>3}  {each.name:<10} {each.title}\n" for each in SCENARIOS))
        return 0
    try:
        run, failed = _run(options)
    except (OutboxqError, PgbenchFailed) as error:
        say_on_stderr(f"error: {error}")
        return 2
    _write(run, options)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure outboxq beside its limits.")
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"which (all): {', '.join(names)}, or numbers")
    parser.add_argument("--server", metavar="URL", help="a running server, instead of the embedded one")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument("--seconds", type=float, help="how long one repeat measures, about")
    parser.add_argument("--slots", type=int, help="the slots of relays in lease mode (as each scenario says)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, and nothing else")
    sizes.add_argument("--full", action="store_true", help="the large tables in their full size")
    parser.add_argument("--peers", action="store_true", help="measure the other queues too, in the same run")
    parser.add_argument("--peers-file", type=Path, metavar="FILE", help="take their figures from an earlier run's JSON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table (standard output without it)")
    parser.add_argument("--svg", type=Path, metavar="DIR", help="write a plot for each scenario")
    parser.add_argument("--list", action="store_true", help="say which scenarios there are")
    return parser


def _chosen(names: Sequence[str]) -> list[Scenario]:
    """By name or number, in the order of the table.

    Raises:
        OutboxqError: there is no such scenario.
    """
    known = {scenario.name for scenario in SCENARIOS} | {str(scenario.number) for scenario in SCENARIOS}
    unknown = sorted(set(names) - known)
    if unknown:
        raise OutboxqError(f"no scenario {', '.join(unknown)} (known: {', '.join(each.name for each in SCENARIOS)})")
    return [each for each in SCENARIOS if not names or each.name in names or str(each.number) in names]


def _run(options: argparse.Namespace) -> tuple[Run, bool]:
    chosen, pgbench, begun = _chosen(options.scenarios), find_pgbench(), time.monotonic()
    size = QUICK if options.quick else FULL if options.full else DEFAULT
    if options.seconds is not None:
        size = replace(size, seconds=options.seconds)
    failed = False
    with start_server(options.server) as server:
        bench = Bench(server, pgbench, size, options.repeats, say_on_stderr, options.slots)
        run = Run(bench.surroundings(), options.repeats)
        say_on_stderr(f"{run.surroundings.server}; size {size}\nreference limit, first")
        first = measure_limit(bench, UPDATE_LIMIT)
        peers = _peers(options, server.url, {each.name for each in chosen})
        for scenario in chosen:
            failed = not _measure(bench, peers, scenario, run) or failed
        say_on_stderr("reference limit, last")
        run.drift = first, measure_limit(bench, UPDATE_LIMIT)
    run.seconds = time.monotonic() - begun
    return run, failed


def _measure(bench: Bench, peers: Peers, scenario: Scenario, run: Run) -> bool:
    """Add the scenario's lines; return True if it could be measured."""
    say_on_stderr(f"{scenario.number} {scenario.name}: {scenario.title}")
    try:
        run.lines += scenario.measure(bench, peers)
    except _EXPECTED as error:
        say_on_stderr(f"  failed: {error}")
        run.lines.append(Unsupported(scenario.number, scenario.name, scenario.title, f"failed: {type(error).__name__}"))
        return False
    return True


def _peers(options: argparse.Namespace, server_url: str, names: set[str]) -> Peers:
    """The other queues' figures: from a file, measured now on the same server, or none."""
    if options.peers_file is not None:
        return Peers.read(options.peers_file)
    wanted = sorted({scenario for name in names for scenario in _OF_PEERS.get(name, ())})
    if not options.peers or not wanted:
        return Peers([])
    with tempfile.TemporaryDirectory(prefix="outboxq-benchmark-") as directory:
        path = Path(directory) / "peers.json"
        command = [sys.executable, "-m", "benchmarks.peers", "run", "--json", str(path), "--server", server_url]
        command += ["--repeats", str(options.repeats)]
        command += [f"--scenario={scenario}" for scenario in wanted]
        done = subprocess.run(command, cwd=_ROOT, check=False, stdout=sys.stderr)
        if done.returncode:
            say_on_stderr(f"  the other queues could not all be measured (exit code {done.returncode})")
        if not path.is_file():
            say_on_stderr(
                "  none of the other queues was measured; to install them: python -m benchmarks.peers install"
            )
            return Peers([])
        return Peers.read(path)


def _write(run: Run, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(as_json(run))
    if options.svg is not None:
        write_plots(run, options.svg)
    if options.markdown is not None:
        options.markdown.write_text(as_markdown(run))
    else:
        sys.stdout.write(as_markdown(run))


if __name__ == "__main__":
    # As Ctrl-C: relays, proxies and servers are ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
