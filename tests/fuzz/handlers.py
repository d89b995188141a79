"""Handlers that run programs: one for each sort of arguments, registered as batchable or not."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any, TypeAlias

import msgspec
from sqlalchemy.orm import make_transient_to_detached

from outboxq import AsyncContext, Backoff, Context, DeadLetter, Discard, Done, Jobs, Locked, Retry, Snooze
from outboxq.handlers.handler import AnyHandler
from outboxq.outbox.session import add_job
from tests.fuzz import steps_changing, steps_reading, steps_sending, steps_session  # noqa: F401  # they register
from tests.fuzz.frame import STEPS, Frame, new_row, seen
from tests.fuzz.models import CLASSES
from tests.fuzz.program import Around, Block, Ending, Flavour, Given, Step, Task

# A failed attempt comes again when the lane promotes it, and once.
RETRY = Backoff(max_attempts=2, first_seconds=3600, jitter=0)
_LATER = timedelta(hours=1)
_OUTCOMES: Mapping[str, object] = {
    "done": Done(),
    "retry": Retry(_LATER),
    "snooze": Snooze(_LATER),
    "dead": DeadLetter("no"),
    "discard": Discard("no"),
}
# How many entities a handler with an around is given at most.
MOST_GIVEN_WITHIN = 1
# What a handler is given: of each entity its class, whether it may be None, and whether its row is locked.
Shape: TypeAlias = tuple[tuple[str, bool, bool], ...]
# Coroutines do these without a thought of I/O.
_AT_ONCE = frozenset({"change", "put", "express", "put_extra", "see", "note", "notes_of_all", "chain", "tell"})


class ProgrammedError(Exception):
    """A handler was told to fail."""


@dataclass
class Ledger:
    """What the handlers of a lane are to do, and what each saw when it last ran (a run that is undone comes again)."""

    tasks: dict[str, Task] = field(default_factory=dict)
    seen: dict[str, list[object]] = field(default_factory=dict)
    calls: int = 0
    kept: dict[str, object] = field(default_factory=dict)
    # Names of jobs whose around has begun their run.
    within: set[str] = field(default_factory=set)

    def log_of(self, name: str, attempt: int) -> list[object]:
        return self.seen[f"{name}, attempt {attempt}"]

    def begin(self, name: str, attempt: int) -> list[object]:
        self.calls += 1
        self.seen[f"{name}, attempt {attempt}"] = log = []
        return log


class Handlers:
    """The handlers of a lane, by what they are given."""

    def __init__(self, ledger: Ledger, *, batchable: bool) -> None:
        self.jobs = Jobs()
        self._surrounded = Jobs()
        self._ledger = ledger
        self._batchable = batchable
        self._by_kind: dict[tuple[Jobs, Flavour, Shape], AnyHandler] = {}
        shapes: list[Shape] = [()]
        shapes += [((name, *how),) for name in CLASSES for how in product((False, True), repeat=2)]
        pairs = product(CLASSES, CLASSES, (False, True))
        shapes += [((one, False, locked), (two, False, False)) for one, two, locked in pairs]
        for flavour in ("sync", "async"):
            for shape in shapes:
                self._register(self.jobs, flavour, shape)
                if len(shape) <= MOST_GIVEN_WITHIN:
                    self._register(self._surrounded, flavour, shape)
        self._surrounded.around(self._around, flavour="sync")
        self._surrounded.around(self._around_async, flavour="async")
        self.jobs.include(self._surrounded)

    def add(self, session: Any, flavour: Flavour, name: str, task: Task, priority: int = 0) -> Any:
        """Enqueue a task under a name."""
        self._ledger.tasks[name] = task
        shape = tuple((each.name, each.optional, each.locked) for each in task.given)
        jobs = self.jobs if task.around is None else self._surrounded
        handler = self._by_kind[jobs, flavour, shape].options(priority=priority)
        rows = {place: _detached(each) for place, each in zip("ab", task.given, strict=False)}
        return add_job(session, handler, name=name, **rows)

    def _register(self, jobs: Jobs, flavour: Flavour, shape: Shape) -> None:
        run = self._sync(flavour) if flavour == "sync" else self._async(flavour)
        context = Context if flavour == "sync" else AsyncContext
        parameters = [("ctx", context), ("name", str)]
        parameters += [(place, _annotation(*each)) for place, each in zip("ab", shape, strict=False)]
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kinds, annotation=type_) for name, type_ in parameters])
        run.__signature__ = signature  # type: ignore[attr-defined]
        kind = "-".join(
            [
                flavour,
                *(["around"] if jobs is self._surrounded else []),
                *(name + "?" * optional + "!" * locked for name, optional, locked in shape),
            ]
        )
        decorate = jobs.handler(
            kind=kind, queue=f"fuzz-{flavour}", retry=RETRY, batchable=self._batchable, timeout_seconds=60
        )
        self._by_kind[jobs, flavour, shape] = decorate(run)

    def _around(self, ctx: Context) -> object:
        program, frame = self._begun(ctx, lambda: ctx.session, "sync")
        for step in program.before:
            perform(frame, step)
        return self._wrapping(program, frame)

    async def _around_async(self, ctx: AsyncContext) -> object:
        program, frame = self._begun(ctx, lambda: ctx.session.sync_session, "async")
        for step in program.before:
            await perform_async(ctx, frame, step)
        wrapping = self._wrapping(program, frame)
        return _Awaited(wrapping, ctx) if isinstance(wrapping, _Wrapping) else wrapping

    def _begun(self, ctx: Any, name_session: Callable[[], Any], flavour: Flavour) -> tuple[Around, Frame]:
        name = msgspec.json.decode(ctx.job.args)["name"]
        program = self._ledger.tasks[name].around
        assert program is not None
        # Left there if an earlier run did not come to its handler.
        self._ledger.within.discard(name)
        frame = self._frame(ctx, name_session, flavour, name, {})
        self._ledger.within.add(name)
        return program, frame

    def _wrapping(self, program: Around, frame: Frame) -> object:
        if program.way == "error":
            raise ProgrammedError("as programmed")
        return None if program.way == "none" else _OUTCOMES.get(program.way, _Wrapping(program, frame))

    def _sync(self, flavour: Flavour) -> Callable[..., object]:
        def run(ctx: Context, name: str, **rows: object) -> object:
            frame = self._frame(ctx, lambda: ctx.session, flavour, name, rows)
            try:
                for step in self._ledger.tasks[name].steps:
                    perform(frame, step)
            finally:
                frame.log.append(["at the end", [seen(entity) for entity in frame.held]])
            return _end(self._ledger.tasks[name].ending, ctx.job.attempt)

        return run

    def _async(self, flavour: Flavour) -> Callable[..., object]:
        async def run(ctx: AsyncContext, name: str, **rows: object) -> object:
            frame = self._frame(ctx, lambda: ctx.session.sync_session, flavour, name, rows)
            try:
                for step in self._ledger.tasks[name].steps:
                    await perform_async(ctx, frame, step)
            finally:
                frame.log.append(["at the end", [seen(entity) for entity in frame.held]])
            return _end(self._ledger.tasks[name].ending, ctx.job.attempt)

        return run

    def _frame(
        self, ctx: Any, name_session: Callable[[], Any], flavour: Flavour, name: str, rows: Mapping[str, object]
    ) -> Frame:
        # The around of a job has begun its run already.
        is_within = name in self._ledger.within
        log = self._ledger.log_of(name, ctx.job.attempt) if is_within else self._ledger.begin(name, ctx.job.attempt)
        self._ledger.within.discard(name)
        held = [row for row in rows.values() if row is not None]
        log.append(["given", [seen(row) for row in rows.values()], len({id(row) for row in held})])
        chained = 0

        def add_task(task: Task, priority: int) -> None:
            nonlocal chained
            chained += 1
            self.add(ctx.session, flavour, f"{name}.{chained}", task, priority)

        return Frame(name_session, ctx.defer, add_task, held, self._ledger.kept, log)


def perform(frame: Frame, step: Step | Block) -> None:
    """Do one step, or a block of them, and note what came of it."""
    if isinstance(step, Step):
        frame.log.append([step.name, STEPS[step.name](frame, *step.args)])
        return
    frame.log.append([step.name, "begins"])
    try:
        with _entered(frame, step):
            for each in step.steps:
                perform(frame, each)
            if step.name == "undone":
                raise _Undo
    except _Undo:
        pass
    except Exception as error:
        if step.name != "swallowed":
            raise
        frame.log.append(["swallowed", type(error).__name__])


async def perform_async(ctx: AsyncContext, frame: Frame, step: Step | Block) -> None:
    """The same in a coroutine."""
    if step.name in _AT_ONCE or step.name.startswith("defer"):
        perform(frame, step)
    else:
        await ctx.session.run_sync(lambda _: perform(frame, step))
    await asyncio.sleep(0)


@dataclass
class _Wrapping:
    """The context manager of an around."""

    program: Around
    frame: Frame

    def __enter__(self) -> None:
        self.frame.log.append(["around", "entered"])

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        self.note(error)
        if error is None:
            for step in self.program.after:
                perform(self.frame, step)
        return self.end()

    def note(self, error: BaseException | None) -> None:
        self.frame.log.append(["around", "left", type(error).__name__])

    def end(self) -> bool:
        if self.program.way == "late error":
            raise ProgrammedError("as programmed, late")
        return self.program.way == "swallow"


@dataclass
class _Awaited:
    """The same for coroutines."""

    wrapping: _Wrapping
    ctx: AsyncContext

    async def __aenter__(self) -> None:
        self.wrapping.__enter__()

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        self.wrapping.note(error)
        if error is None:
            for step in self.wrapping.program.after:
                await perform_async(self.ctx, self.wrapping.frame, step)
        return self.wrapping.end()


class _Undo(Exception):
    """Ends a savepoint by going back to it."""


def _entered(frame: Frame, step: Block) -> AbstractContextManager[object]:
    match step.name:
        case "kept" | "undone":
            return frame.session.begin_nested()
        case "no_autoflush":
            return frame.session.no_autoflush
        case _:
            return nullcontext()


def _end(ending: Ending, attempt: int) -> object:
    if ending == "error" or (ending == "first-error" and attempt == 1):
        raise ProgrammedError("as programmed")
    if ending == "exit":
        raise SystemExit("as programmed")
    return _OUTCOMES.get(ending) if ending != "done" else None


def _annotation(name: str, optional: bool, locked: bool) -> Any:
    entity: Any = CLASSES[name] | None if optional else CLASSES[name]
    return Locked[entity] if locked else entity


def _detached(given: Given) -> object:
    """A row as a producer names it, without reading it."""
    row = new_row(given.name, given.key)
    make_transient_to_detached(row)
    return row
