"""Row 14: the cost of a relay that has nothing to do, and how soon it works."""

import subprocess
import sys
import time
from functools import partial

from benchmarks.bench import Bench, Workbench
from benchmarks.figures import Better, Comparison, Series, Unsupported
from benchmarks.gauges import resident_megabytes
from benchmarks.proxy import running_proxy
from benchmarks.relays import RelayOptions, running_relay

_JOBS = 500
_RELAY = RelayOptions("update", slots=2)
# After its last job a relay looks less and less often, up to once a second.
_SETTLING_SECONDS = 4.0


def cost(bench: Bench) -> list[Comparison | Unsupported]:
    """Memory, start and idleness, each held against a plain number."""
    with bench.database() as workbench:
        help_time = bench.alternate({"outboxq --help": _help_seconds}, "s")["outboxq --help"]
        first = bench.alternate({"start to first claim": partial(_start_seconds, workbench)}, "s")
        memory, idle = _idle(bench, workbench)
    return [
        _line("memory of a relay process with two slots", memory, 90),
        _line("outboxq --help", help_time, 0.25),
        _line("start of a relay to its first claim", first["start to first claim"], 1.5),
        _line("statements sent by an idle relay with two slots", idle, 3),
    ]


def _line(what: str, ours: Series, target: float) -> Comparison:
    return Comparison(14, "cost", what, ours, None, "", target, Better.lower)


def _help_seconds() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "outboxq", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def _start_seconds(workbench: Workbench) -> float:
    workbench.fill(_JOBS)
    begun = time.perf_counter()
    with running_relay(workbench.url, _RELAY) as relay:
        relay.wait_until(lambda: any(relay.counts()), "the first job")
        return time.perf_counter() - begun


def _idle(bench: Bench, workbench: Workbench) -> tuple[Series, Series]:
    """Measure megabytes, and statements a second as a proxy counts them: all that are sent, on every connection."""
    workbench.fill(_JOBS)
    seconds = 1.0 if bench.size.name == "quick" else 10.0
    megabytes: list[float] = []
    rates: list[float] = []
    with running_proxy(workbench.url, 0.0) as proxy, running_relay(proxy.url, _RELAY) as relay:
        relay.wait_until(lambda: sum(relay.counts()) >= _JOBS, "all jobs to run")
        time.sleep(0.0 if bench.size.name == "quick" else _SETTLING_SECONDS)
        for _ in range(bench.repeats):
            before, begun = proxy.count(), time.monotonic()
            time.sleep(seconds)
            rates.append((proxy.count() - before) / (time.monotonic() - begun))
            megabytes.append(resident_megabytes(relay.process.pid))
    bench.say(f"  idle: {rates[-1]:.2g} statements/s, {megabytes[-1]:.0f} MB")
    return Series(tuple(megabytes), "MB"), Series(tuple(rates), "statements/s")
