"""Row 13: one slot, one job a transaction, where every round trip costs 2 ms."""

import statistics
import time
from functools import partial

import psycopg

from benchmarks import limits
from benchmarks.bench import ACCOUNTS, Bench, Workbench, conninfo
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.proxy import running_proxy
from benchmarks.relays import RelayOptions, fill_and_drain
from benchmarks.scenarios.throughput import UPDATE

_ONE_WAY_SECONDS = 0.001
# Of a handler: its UPDATE; or the SELECT of its entity, and the UPDATE.
_STATEMENTS, _OF_AN_ENTITY = 1, 2
_LIMIT = "pgbench through the same proxy, 41 round trips for 20 jobs, 1 client"
# In one script of pgbench, which prepares each statement of it by itself.
_JOBS = 20


def network(bench: Bench) -> list[Comparison | Unsupported]:
    """The limit is arithmetic: one round trip for outboxq, one for each of the handler's statements."""
    best, best_entity = (1 / (2 * _ONE_WAY_SECONDS * (1 + number)) for number in (_STATEMENTS, _OF_AN_ENTITY))
    what, entity = (f"{it}, one job a transaction, one slot, 1 ms each way" for it in ("Core UPDATE", "ORM handler"))
    script = limits.update_and_claim_the_next(_JOBS, ACCOUNTS)
    with bench.database() as workbench, running_proxy(workbench.url, _ONE_WAY_SECONDS) as proxy:
        seen, without = _round_trip_ms(proxy.url), _round_trip_ms(workbench.url, 2 * _ONE_WAY_SECONDS)
        limit_through_proxy = partial(bench.limit, Workbench(proxy.url), script, batch=_JOBS)
        ours = partial(fill_and_drain, bench, workbench, UPDATE.relay, bench.rows(best), url=proxy.url)
        orm = partial(fill_and_drain, bench, workbench, RelayOptions("entity"), bench.rows(best_entity), url=proxy.url)
        found = bench.alternate({_LIMIT: limit_through_proxy, what: ours, entity: orm}, "jobs/s")
    limit, limit_of_entity = Series((best,), "jobs/s"), Series((best_entity,), "jobs/s")
    name = f"1 / (2 ms x (1 + {_STATEMENTS} statement))"
    name_of_entity = f"1 / (2 ms x (1 + {_OF_AN_ENTITY} statements))"
    note = (
        f"a SELECT 1 through the proxy took {seen:.2f} ms, and {without:.2f} ms without it where 2 ms lay between two "
        "(medians): what the server and waking up take is in both"
    )
    return [
        Comparison(13, "network", what, found[what], limit, name, 0.8, notes=(note,)),
        Comparison(13, "network", what, found[what], found[_LIMIT], _LIMIT),
        Comparison(13, "network", entity, found[entity], limit_of_entity, name_of_entity, 0.8),
    ]


def _round_trip_ms(url: str, rest_seconds: float = 0.0) -> float:
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        found: list[float] = []
        for _ in range(100):
            time.sleep(rest_seconds)
            begun = time.perf_counter()
            connection.execute("SELECT 1")
            found.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(found)
