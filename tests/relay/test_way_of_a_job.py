"""The way of one job: its depth, its breadth, and the size of the core around it.

A change that lowers a figure lowers its bound. `pytest -rP` or `python -m tests.tools.house` prints the figures.
"""

import traceback

import pytest
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.postgres import Database
from tests.support.way_of_a_job import PACKAGE, WAYS, Way, measure_way
from tests.tools.house import core_figures

# With Python 3.11, which calls comprehensions as functions.
WAY_BOUNDS = {
    "producer": Way(55, 46, 10),
    "plain job, transaction mode": Way(98, 85, 19),
    "plain job, lease mode": Way(149, 112, 25),
    "retry": Way(205, 164, 27),
    "dead letter": Way(201, 160, 26),
    "grouped job": Way(106, 88, 21),
}
# Listeners that other tests have left in this process may cost a call.
_ROOM = Way(5, 3, 1)
CORE_BOUNDS = {
    "fields of BatchState": 15,
    "fields of its parts": 15,
    "assignments to them in other modules": 32,
    "other modules that assign them": 9,
    "assignments to them outside execution/": 0,
    "public methods of the planner": 4,
    "attributes of the planner that other modules assign": 0,
    "lines of the core that mention groups": 5,
    "lines of the core that mention suspects": 5,
    "lines of the core that mention kept rows": 0,
    "lines of the core that mention coalescing and windows": 0,
    "lines of the core that mention cancellation": 5,
    "lines of the core that mention prepared claims": 0,
    "lines of the core that mention limits": 1,
    "lines of the core that mention rates": 0,
    "lines of the core that mention callback batches": 0,
    "lines of the core that mention unique jobs": 1,
    "lines of execution/": 6_255,
    "lines of relay/ without maintenance/": 6_131,
    "lines of statements/ of claims and outcomes": 1_755,
}


@pytest.mark.parametrize("name", WAYS)
def test_a_job_passes_few_functions_and_files(name: str, outboxq_database: Database) -> None:
    """The code that a reader follows from one handler to the next does not grow unseen."""
    way, _ = measure_way(outboxq_database.url, name)
    print(f"{name}: {way}")
    within = [figure <= bound + room for figure, bound, room in zip(way, WAY_BOUNDS[name], _ROOM, strict=True)]
    assert all(within), WAY_BOUNDS[name]


def test_the_core_names_few_families_and_owns_its_fields() -> None:
    """Mentions of families, assignments by other modules, and lines do not grow unseen."""
    figures = core_figures()
    for name, figure in figures.items():
        print(f"{name}: {figure:,}")
    assert figures.keys() == CORE_BOUNDS.keys()
    assert {name: figure for name, figure in figures.items() if figure > CORE_BOUNDS[name]} == {}


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_eleven_functions_at_most_lead_from_the_serve_loop_to_a_handler(
    claim: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """The traceback of a handler is the way of its job, short enough to be read; two of them end what it forks."""
    jobs, ways = Jobs(), []

    @jobs.handler(queue="q", claim=claim)  # type: ignore[arg-type]  # one of the two modes
    def look(ctx: Context) -> None:
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(PACKAGE))]
        names = [frame.name for frame in ours]
        ways.append(names[names.index("_serve") :])

    with sessions.begin() as session:
        session.add_job(look)
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1)).drain()
    (way,) = ways
    assert len(way) <= 11, "\n".join(way)
