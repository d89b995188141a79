"""How random batches are drawn: mostly jobs that meet in the same few rows, mostly ones that a batch can share."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from hypothesis import strategies as st

from tests.fuzz.handlers import MOST_GIVEN_WITHIN
from tests.fuzz.models import CLASSES
from tests.fuzz.program import Around, Batch, Block, Ending, Flavour, Given, Step, Task, Way

# Classes whose rows have to do with one another: a batch keeps to one of these, or takes them all.
FAMILIES: tuple[tuple[str, ...], ...] = (
    ("Account", "SameAccount", "AccountView", "Leaf", "Ticket", "Summed"),
    ("Branch", "Till", "Ruled", "Heard", "Purse"),
    ("Account", "Branch", "Pair", "Cat"),
    ("Parent", "Child", "Branch", "Account"),
    ("Purse", "Branch"),
    ("Stamped", "Versioned", "Figured", "Touched", "Dog"),
    ("Placed", "Parted", "Guarded", "Alike"),
    tuple(CLASSES),
)
# Rows 1 to 3 are there, 4 is not. The first of each is what a batch shrinks to.
KEYS = st.sampled_from((1,) * 8 + (2,) * 5 + (3, 3, 4))
NUMBERS = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 9, 0, -1))
PLACES = st.integers(0, 2)
WORDS = st.sampled_from(("a", "b", "c"))
# Of most batches no job fails: one that does leaves nothing shared.
ENDINGS: tuple[Ending, ...] = (*("done",) * 80, "error", "first-error", "retry", "snooze", "dead", "discard", "exit")

# What the arguments of a step are: p a place among the rows that are held, c a class, k a key, n a number, w a word;
# e how a transaction is ended, l how a session is left, t by way of what it is come by.
_QUIET = {
    "change": "pn", "put": "pn", "express": "pn", "put_extra": "pnn", "put_back": "p", "see": "p", "flag": "p",
    "change_document": "pn", "change_settings": "pn", "change_in_place": "pn", "change_unseen": "pn",
    "set_committed": "pn", "defer_update": "ckn", "defer_value": "ckn", "defer_expression": "ckn", "defer_text": "ckn",
    "defer_sum": "ck", "defer_insert": "w", "tell": "n", "tell_of": "p", "keep_in_info": "n", "attach": "ck",
    "put_unloaded": "ckn", "put_kept_document": "pn", "defer_kept_document": "kn", "defer_with_kept_document": "kn",
    "hook": "n", "hook_commit": "n", "put_two_unloaded": "ckn",
    "put_point": "pn", "put_doubled": "pn", "defer_upsert": "ckn", "hook_begin": "n",
}  # fmt: skip
_READING = {
    "anything": "", "get": "ck", "get_one": "ck", "select_one": "ck", "select_all": "c", "select_rich": "",
    "query_above": "cn", "value_of": "ck", "sum_of": "c", "count_of": "c", "rows_by_text": "c",
    "rows_by_connection": "c", "notes": "", "jobs_waiting": "", "read": "p", "read_all": "p", "read_related": "p",
    "refresh": "p", "refresh_value": "p", "look_at_session": "", "select_undeferred": "k",
}  # fmt: skip
_WRITING = {
    "update_core": "ckn", "update_orm": "cknn", "update_returning": "ckn", "update_all": "cn", "update_by_text": "ckn",
    "update_by_connection": "ckn", "update_by_bind": "ckn", "update_by_driver": "ckn", "update_by_cursor": "ckn",
    "call_function": "ckn", "call_by_text": "ckn", "write_in_cte": "ckn", "delete_core": "ck", "delete_orm": "ck",
    "insert_core": "w", "insert_returning": "ckn", "bulk_save": "ckn", "bulk_update": "ckn", "note": "w",
    "notes_of_all": "n", "tell_of_new": "w", "add": "csn", "flush": "", "defer_delete": "ck",
    "update_by_bytes": "ckn", "insert_with_cte": "ckn", "insert_from_select": "ckn", "upsert": "ckn",
    "upsert_nothing": "ckn", "upsert_returning": "ckn", "delete_returning": "ck", "update_hybrid": "kn",
    "update_composite": "kn", "defer_from_select": "ckn", "defer_hybrid": "kn",
}  # fmt: skip
_UNRULY = {
    "get_anew": "ck", "get_locked": "ck", "select_anew": "c", "select_locked": "ck", "refresh_locked": "p",
    "delete": "p", "merge": "ckn", "expunge": "p", "forget": "p", "expire": "p", "expire_value": "p", "put_key": "pk",
    "add_child": "pkn", "remove_child": "p", "change_children": "pn", "change_related": "pn", "move": "pp",
    "flush_one": "p", "commit": "", "rollback": "", "close": "", "expire_all": "", "expunge_all": "",
    "autoflush_off": "", "leave_savepoint": "", "fail_in_database": "", "end_transaction": "et",
    "end_savepoint": "et", "leave_session": "lt", "begin_in_vain": "wt",
}  # fmt: skip
# By arounds alone: what a job sets, a later one of its batch would find.
_AROUND = {"set_here": "n", "hook_load": "n"}
_KINDS = {**_QUIET, **_READING, **_WRITING, **_UNRULY, **_AROUND}
# What jobs are made of. Quiet ones send nothing while they run: they are what a batch shares.
_MIXTURES = {
    "quiet": tuple(_QUIET),
    "reading": (*_QUIET, *_READING),
    "writing": (*_QUIET, *_READING, *_WRITING),
    "unruly": (*_QUIET, *_READING, *_WRITING, *_UNRULY, *("block",) * 25),
}
_BLOCKS: tuple[Literal["kept", "undone", "no_autoflush", "swallowed"], ...] = (
    "kept", "undone", "no_autoflush", "swallowed",
)  # fmt: skip
_NAMES = {how: st.sampled_from(names) for how, names in _MIXTURES.items()}
# Blocks have more upserts than the rest of a job: an error that one of them causes may be swallowed there.
_INSIDE = st.sampled_from((*_MIXTURES["writing"], *("upsert", "upsert_nothing", "upsert_returning") * 5))
# Of every other batch the quiet jobs do a few sorts of things, again and again.
_FOCUS = st.just(_NAMES["quiet"]) | st.lists(st.sampled_from(_MIXTURES["quiet"]), min_size=2, max_size=4).map(
    st.sampled_from
)
# More than half of the batches are narrow: scenes of a few jobs of a step or two, all about two rows of a class, or of
# two that have to do with each other, and most of them send nothing. What depends on the order of three jobs comes up
# here.
_NEAR: tuple[tuple[str, ...], ...] = (
    *(("Account",), ("Account", "SameAccount"), ("Purse",)) * 3,
    ("Branch",), ("Pair",), ("Account", "AccountView"), ("Account", "Summed"), ("Account", "Ticket"),
    ("Account", "Leaf"), ("Leaf",), ("Till", "Branch"), ("Ruled", "Branch"), ("Heard", "Branch"), ("Parent", "Child"),
    ("Stamped",), ("Figured",), ("Touched",), ("Versioned",),
)  # fmt: skip
_DEFERRING = ("defer_update", "defer_value", "defer_expression", "defer_text", "defer_sum")
_UNLOADED = ("put_unloaded", "put_unloaded", "put_two_unloaded")
_NEAR_STEPS = (
    *_DEFERRING, "change", "put", "put_extra", "express", "put_unloaded", "defer_insert", "put_kept_document",
    "defer_kept_document", "hook", "tell", "put_back",
)  # fmt: skip
# More of those that wait, and whose statements are equal whatever their values are.
_DEFERRED = (*_DEFERRING, "defer_update", "defer_value", "defer_update", "defer_value")
_NEAR_FOCUS = st.one_of(
    st.lists(st.sampled_from(_NEAR_STEPS), min_size=1, max_size=3),
    st.lists(st.sampled_from(_DEFERRED), min_size=2, max_size=3),
    st.lists(st.sampled_from((*_UNLOADED, *_DEFERRED)), min_size=2, max_size=3),
).map(st.sampled_from)
# Whether jobs are given rows, and how often all of it is about the same one. If none is given any, no load sends what
# waits: many changes of one row come together. A row that is loaded ahead is there for its next job alone.
_NEAR_GIVEN = ((st.just(False), 6), (st.booleans(), 2), (st.sampled_from((True, True, False)), 2))
# A row that is not there fails its job, and with it what the batch shares: seldom.
_NEAR_KEYS = st.sampled_from((*(1,) * 9, *(2,) * 6, 4))
_SEEN = ("change", "put", "see", "put")
_SENT = ("update_core", "update_by_text", "update_by_cursor", "call_function")
_TURNS = (
    *(("defer_value", "end_transaction"),) * 2,
    *(("note", "end_transaction"), ("note", "leave_session"), ("note", "hook_begin")),
)
_DOCUMENTS = ("put_kept_document", "defer_kept_document", "defer_with_kept_document")


class _Theme(NamedTuple):
    """The classes of a scene's jobs, their steps, and if they are given rows.

    A job has as many steps as one of `lengths`. If `is_read`, one more job reads all rows at the end, before the next
    scene overwrites them.
    """

    classes: tuple[tuple[str, ...], ...]
    focus: st.SearchStrategy[st.SearchStrategy[str]]
    given: tuple[tuple[st.SearchStrategy[bool], int], ...]
    is_read: bool = False
    lengths: tuple[int, ...] = (1, 1, 2)


# Most scenes are about one thing that decides what may wait: the order of writes, one row by two names, what a
# table does by itself, values that change while they wait, columns that other rows bind.
_ANY = _Theme(_NEAR, _NEAR_FOCUS, _NEAR_GIVEN)
# What needs three jobs in order comes up rarely, and counts several times.
_MANY_FORMS = _Theme((("Account",),), st.just(st.sampled_from(_UNLOADED)), ((st.just(False), 8),), is_read=True)
_BEFORE_AND_BEHIND = _Theme(
    (("Account",),),
    st.just(st.sampled_from(("put_unloaded", "defer_update", "defer_value"))),
    ((st.just(False), 1),),
    is_read=True,
)
_PURSES = _Theme((("Purse",),), st.just(st.sampled_from((*("put_extra",) * 4, "put_unloaded"))), ((st.just(True), 8),))
_THEMES = (
    *(_ANY,) * 4,
    *(_MANY_FORMS,) * 2,
    *(_BEFORE_AND_BEHIND,) * 3,
    _Theme(
        (("Account",),),
        st.just(st.sampled_from((*_UNLOADED, *_DEFERRED))),
        ((st.just(False), 5), (st.just(False), 1)),
        is_read=True,
    ),
    _Theme(
        (
            *(("Account", "SameAccount"),) * 3,
            *(("Account", "AccountView"), ("Account", "Summed"), ("Account", "Leaf")),
        ),
        st.just(st.sampled_from(_SEEN)),
        ((st.just(True), 8),),
    ),
    _Theme(
        (("Till", "Branch"), ("Ruled", "Branch"), ("Heard", "Branch"), ("Figured",), ("Touched",), ("Stamped",)),
        st.just(st.sampled_from(_SEEN)),
        ((st.just(True), 8),),
    ),
    # Only what touches one row of one other table shows a rule or a trigger: each counts by itself.
    _Theme((("Ruled", "Branch"),), st.just(st.sampled_from(_SEEN)), ((st.just(True), 8),)),
    _Theme((("Till", "Branch"),), st.just(st.sampled_from(_SEEN)), ((st.just(True), 8),)),
    # Rows that are changed as objects, and by a statement that is sent: most often on the driver's cursor.
    _Theme(
        (("Account",), ("Branch",)),
        st.sampled_from(("update_by_cursor", *_SENT)).map(lambda sent: st.sampled_from((*_SEEN, sent))),
        ((st.booleans(), 8),),
    ),
    # What a job has done when its session's transaction begins or ends.
    _Theme(
        (("Account",),),
        st.sampled_from(_TURNS).map(lambda turn: st.sampled_from(("change", "put", *turn))),
        ((st.just(True), 8),),
        lengths=(3,),
    ),
    # A row that is changed by a job that was not given it, between jobs that are.
    _Theme((("Account",),), st.just(st.sampled_from(("put_unloaded", *_SEEN))), ((st.booleans(), 2),)),
    # A document that is assigned waits between jobs that are given rows, one that is deferred between others.
    _Theme((("Account",),), st.just(st.just("put_kept_document")), ((st.just(True), 1),)),
    _Theme((("Account",),), st.just(st.sampled_from(_DOCUMENTS)), ((st.just(False), 1), (st.booleans(), 2))),
    *(_PURSES,) * 2,
)
# What arounds do before their handlers; about the rows that these are given, mostly.
_AROUNDS: dict[str, tuple[str, ...]] = {
    "nothing": (), "select": ("value_of",), "setting": ("set_here",), "update": ("update_core",),
    "text": ("update_by_text",), "get": ("get", "change"), "listener": ("hook_load",), "defer": ("defer_update",),
    "add": ("note",),
}  # fmt: skip
# What they do behind them.
_BEHIND = ("value_of", "update_core", "note", "defer_update", "change", "flush", "sum_of")
# Most of them let their jobs be done.
_WAYS: tuple[Way, ...] = (
    *("wrap",) * 50, *("none",) * 10, *("done",) * 5, *("swallow",) * 5,
    "retry", "snooze", "dead", "discard", "error", "late error",
)  # fmt: skip
# More of what goes past SQLAlchemy.
_SENDING = st.sampled_from((*_READING, *_WRITING, *("update_by_cursor",) * 12))
_FAMILY = {family: st.sampled_from(family) for family in FAMILIES}
_DRAWN = {
    "p": PLACES, "k": KEYS, "n": NUMBERS, "w": WORDS, "s": st.sampled_from((5, 6, 7, 1)),
    "e": st.sampled_from(("rollback", "close", "commit")), "t": st.sampled_from(("context", "row")),
    "l": st.sampled_from(("rollback", "commit", "close", "reset", "expunge_all", "expire_all", "prepare")),
}  # fmt: skip
_LOCKED = st.sampled_from((False, False, True))
_FLAVOURS = st.sampled_from(("sync", "sync", "sync", "async"))
_HOW = st.sampled_from(("quiet", "quiet", "quiet", "reading", "writing", "unruly"))


def batches() -> st.SearchStrategy[Batch]:
    """Any batch of two to thirty-six jobs; one in six has arounds."""
    return st.one_of(*(_narrow_batches(),) * 3, *(_wide_batches(),) * 2, _surrounded_batches())


@st.composite
def _surrounded_batches(draw: Any) -> Batch:
    batch: Batch = draw(_narrow_batches() | _wide_batches())
    # In every other batch they are all of one sort.
    sorts = draw(st.just(tuple(_AROUNDS)) | st.sampled_from(tuple(_AROUNDS)).map(lambda name: (name,)))
    return Batch(tuple(draw(_surrounded(task, sorts)) for task in batch.tasks), batch.flavour)


@st.composite
def _surrounded(draw: Any, task: Task, sorts: tuple[str, ...]) -> Task:
    how = draw(st.sampled_from(("", *sorts)))
    if not how or len(task.given) > MOST_GIVEN_WITHIN:
        return task
    steps, way = task.steps, draw(st.sampled_from(_WAYS))
    classes = st.sampled_from([each.name for each in task.given] or ["Account"])
    drawn = {**_DRAWN, "c": classes}
    before = [_draw_args(draw, name, drawn) for name in _AROUNDS[how]]
    after = [_draw_args(draw, draw(st.sampled_from(_BEHIND)), drawn)] if draw(st.booleans()) else []
    if how == "setting":
        # Read by the handler, and behind it.
        after, steps = [Step("look_here")], (*steps, Step("look_here"))
    return replace(task, steps=steps, around=Around(tuple(before), tuple(after), way))


@st.composite
def _narrow_batches(draw: Any) -> Batch:
    flavour: Flavour = draw(_FLAVOURS)
    scenes = [draw(_scenes()) for _ in range(draw(st.sampled_from((1, 3, 3, 4))))]
    return Batch(tuple(task for scene in scenes for task in scene), flavour)


@st.composite
def _scenes(draw: Any) -> list[Task]:
    theme = draw(st.sampled_from(_THEMES))
    classes = st.sampled_from(draw(st.sampled_from(theme.classes)))
    key, (is_given, often) = draw(_NEAR_KEYS), draw(st.sampled_from(theme.given))
    drawn = {**_DRAWN, "c": classes, "k": st.sampled_from((key,) * often + (key % 3 + 1,))}
    narrow = _narrow_tasks(drawn, draw(theme.focus), is_given, st.sampled_from(theme.lengths))
    tasks: list[Task] = draw(st.lists(narrow, min_size=draw(st.sampled_from((2, 4, 6))), max_size=8))
    if theme.is_read:
        tasks.append(Task(steps=(_draw_args(draw, "rows_by_text", drawn),)))
    return tasks


@st.composite
def _narrow_tasks(
    draw: Any,
    drawn: dict[str, Any],
    quiet: st.SearchStrategy[str],
    is_given: st.SearchStrategy[bool],
    lengths: st.SearchStrategy[int],
) -> Task:
    given: tuple[Given, ...] = ()
    if draw(is_given):
        given = (Given(draw(drawn["c"]), draw(drawn["k"]), optional=True, locked=draw(_LOCKED)),)
    # One job in fifteen sends something.
    names = draw(st.sampled_from((quiet,) * 14 + (_SENDING,)))
    steps = [_draw_args(draw, draw(names), drawn) for _ in range(draw(lengths))]
    return Task(given, tuple(steps))


@st.composite
def _wide_batches(draw: Any) -> Batch:
    # Few classes and few keys, so that the jobs meet.
    family = draw(st.sampled_from(FAMILIES))
    names = tuple(draw(_FAMILY[family]) for _ in range(draw(st.integers(1, 3))))
    flavour: Flavour = draw(_FLAVOURS)
    quiet = draw(_FOCUS)
    tasks = draw(st.lists(_tasks(st.sampled_from(names), quiet), min_size=draw(st.sampled_from((2, 4, 6))), max_size=8))
    return Batch(tuple(tasks), flavour)


@st.composite
def _tasks(draw: Any, classes: st.SearchStrategy[str], quiet: st.SearchStrategy[str], *, chains: bool = True) -> Task:
    given = _draw_given(draw, classes)
    how = draw(_HOW)
    names = quiet if how == "quiet" else _NAMES[how]
    steps = [_draw_step(draw, classes, names) for _ in range(draw(st.integers(1, 5)))]
    if chains and draw(st.integers(0, 15)) == 15:
        later = draw(_tasks(classes, quiet, chains=False))
        # Never above the batch's own: where each is claimed by itself, it would run before them.
        steps.append(Step("chain", (later, draw(st.sampled_from((0, -5))))))
    return Task(given, tuple(steps), draw(st.sampled_from(ENDINGS)))


def _draw_given(draw: Any, classes: st.SearchStrategy[str]) -> tuple[Given, ...]:
    names = [draw(classes) for _ in range(draw(st.sampled_from((1, 0, 1, 1, 2))))]
    if len(names) == 1:
        return (Given(names[0], draw(KEYS), draw(st.booleans()), draw(_LOCKED)),)
    # A row that is not there fails its job, and with it what the batch shares: seldom.
    rows = [Given(name, min(draw(KEYS), 3)) for name in names]
    if rows and draw(_LOCKED):
        rows[0] = replace(rows[0], locked=True)
    return tuple(rows)


def _draw_step(draw: Any, classes: st.SearchStrategy[str], names: st.SearchStrategy[str]) -> Step | Block:
    name = draw(names)
    if name == "block":
        steps = [_draw_step(draw, classes, _INSIDE) for _ in range(draw(st.integers(1, 3)))]
        return Block(draw(st.sampled_from(_BLOCKS)), tuple(steps))
    return _draw_args(draw, name, {**_DRAWN, "c": classes})


def _draw_args(draw: Any, name: str, drawn: dict[str, Any]) -> Step:
    return Step(name, tuple(draw(drawn[kind]) for kind in _KINDS[name]))
