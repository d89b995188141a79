"""The way of one job: its depth, its breadth, and the size of the core around it.

A change that lowers a figure lowers its bound. `pytest -rP` or `python -m tests.tools.house` prints the figures.
"""

import traceback

import pytest
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.postgres import Database
from tests.support.way_of_a_job import PACKAGE, WAYS, Way, measure_way
from tests.tools.house import code_of, core_figures

# With Python 3.11, which calls comprehensions as functions.
WAY_BOUNDS = {
    "producer": Way(55, 46, 10),
    "plain job, transaction mode": Way(115, 100, 20),
    "plain job, lease mode": Way(134, 106, 20),
    "retry": Way(224, 182, 28),
    "dead letter": Way(221, 179, 27),
    "grouped job": Way(124, 103, 22),
}
# Listeners that other tests have left in this process, and releases of SQLAlchemy, may cost some calls.
_ROOM = Way(10, 8, 1)
CORE_BOUNDS = {
    "fields of BatchState": 15,
    "fields of its parts": 15,
    "assignments to them in other modules": 36,
    "other modules that assign them": 10,
    "assignments to them outside execution/": 0,
    "public methods of the planner": 4,
    "attributes of the planner that other modules assign": 0,
    "lines of the core that mention groups": 2,
    "lines of the core that mention suspects": 2,
    "lines of the core that mention kept rows": 0,
    "lines of the core that mention coalescing and windows": 0,
    "lines of the core that mention cancellation": 1,
    "lines of the core that mention prepared claims": 0,
    "lines of the core that mention limits": 0,
    "lines of the core that mention rates": 0,
    "lines of the core that mention callback batches": 0,
    "lines of the core that mention unique jobs": 0,
    "lines of execution/": 4_745,
    "lines of relay/ without maintenance/": 5_480,
    "lines of statements/ of claims and outcomes": 1_294,
}


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", WAYS)
def test_a_job_passes_few_functions_and_files(name: str, outboxq_database: Database) -> None:
    """The code that a reader follows from one handler to the next does not grow unseen."""
    way, _ = measure_way(outboxq_database.url, name)
    print(f"{name}: {way}")
    within = [figure <= bound + room for figure, bound, room in zip(way, WAY_BOUNDS[name], _ROOM, strict=True)]
    assert all(within), WAY_BOUNDS[name]


@pytest.mark.large
def test_the_core_names_few_families_and_owns_its_fields() -> None:
    """Mentions of families, assignments by other modules, and lines do not grow unseen."""
    figures = core_figures()
    for name, figure in figures.items():
        print(f"{name}: {figure:,}")
    assert figures.keys() == CORE_BOUNDS.keys()
    assert {name: figure for name, figure in figures.items() if figure > CORE_BOUNDS[name]} == {}


def test_only_code_counts() -> None:
    """A longer docstring makes nothing larger."""
    text = '"""One.\n\nTwo.\n"""\n\n# Three.\nDEFAULT = """\na text\n"""  # four\n\n\n'
    text += 'def run() -> None:\n    """Five."""\n'
    assert code_of(text) == ['DEFAULT = """', "a text", '"""  # four', "def run() -> None:"]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_fourteen_functions_at_most_lead_from_a_loop_to_a_handler(
    claim: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """The traceback of a handler is the way of its job, short enough to be read; two of them end what it forks."""
    jobs, ways = Jobs(), []

    @jobs.handler(queue="q", claim=claim)  # type: ignore[arg-type]  # one of the two modes
    def look(ctx: Context) -> None:
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(PACKAGE))]
        names = [frame.name for frame in ours]
        # The loop of a slot, or the thread of a call.
        ways.append(names[names.index("_serve" if claim == "transaction" else "run", 1) :])

    with sessions.begin() as session:
        session.add_job(look)
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1)).drain()
    (way,) = ways
    assert len(way) <= 14, "\n".join(way)
