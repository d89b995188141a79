"""The screen of `outboxq top`: a tab for each table, and actions on the selected row.

Queries and actions run in threads, each on a connection of its own: a slow database never stops the keyboard.
"""

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from outboxq.cli.errors import explain
from outboxq.cli.tables import Column, is_number
from outboxq.cli.top import TopOptions, look, not_known, summary
from outboxq.cli.top_views import VIEWS, View
from outboxq.codec.display import in_full
from outboxq.codec.text import printable
from outboxq.errors import OutboxqError

if TYPE_CHECKING:
    from outboxq.admin.explain import Explanation
    from outboxq.admin.snapshot import Snapshot

# The seconds between two runs of the doctor.
_DOCTOR_SECONDS = 60.0
# The pause after a query that failed.
_PAUSE_SECONDS = 2.0
_STYLE = """
#summary { height: 1; padding: 0 1; background: $primary-background; }
#filter { display: none; height: 3; }
#filter.shown { display: block; }
TabbedContent { height: 1fr; }
TabPane { padding: 0; }
DataTable { height: 1fr; }
Detail { align: center middle; }
Detail VerticalScroll { width: 90%; max-width: 120; height: auto; max-height: 80%; }
Detail VerticalScroll { border: round $primary; padding: 1 2; }
"""


class Detail(ModalScreen[bool]):
    """A window over the tables of `outboxq top` that shows a text, or asks a question.

    After a question, the window returns True for the key y, and False for any other key.
    """

    def __init__(self, said: str, *, asks: bool = False) -> None:
        super().__init__()
        self._said, self._asks = said, asks

    def compose(self) -> ComposeResult:
        """Called by Textual: yield the widget of the text, which is never read as markup."""
        with VerticalScroll():
            yield Static(Text(self._said))

    def on_key(self, event: Any) -> None:
        """Called by Textual at each key: close the window, except for keys that scroll."""
        if event.key in ("up", "down", "pageup", "pagedown", "home", "end"):
            return
        event.stop()
        self.dismiss(self._asks and event.key == "y")


class Top(App[None]):
    """The application of `outboxq top`.

    A thread queries the database regularly, and then all tables are filled again.
    """

    CSS = _STYLE
    TITLE = "outboxq top"
    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("e", "explain", "Explain"),
        Binding("p", "pause", "Pause or resume"),
        Binding("space", "freeze", "Freeze"),
        Binding("q", "quit", "Quit"),
        Binding("escape", "leave_filter", show=False),
    ]

    def __init__(self, options: TopOptions) -> None:
        super().__init__()
        self._options = options
        self._snapshot: Snapshot | None = None
        self._rows: dict[str, list[Any]] = {view.name: [] for view in VIEWS}
        # Each view's sort column, and True if it is reversed; without one, the order of the snapshot.
        self._sorted: dict[str, tuple[str, bool]] = {}
        self._filter = ""
        self.is_frozen = False

    def rows(self, view: str) -> list[Any]:
        """Return the rows that the table named `view` shows, in their present order, which the user can change."""
        return self._rows[view]

    def compose(self) -> ComposeResult:
        """Called by Textual: yield the summary, the tabs, the field of the filter, and the keys."""
        yield Static("Looking …", id="summary")
        with TabbedContent():
            for view in VIEWS:
                with TabPane(view.title.partition(",")[0], id=view.name):
                    yield DataTable(cursor_type="row", zebra_stripes=True)
            with TabPane("Doctor", id="doctor"), VerticalScroll():
                yield Static("Looking …", id="findings")
        yield Input(placeholder="only rows that contain this text", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Called by Textual at the start: begin the queries in threads, and give the first table the keyboard."""
        self._table(VIEWS[0]).focus()
        self._look_always()
        self._examine_always()

    @work(thread=True)
    def _look_always(self) -> None:
        pauses = True
        while pauses:
            try:
                with self._options.reading() as begin:
                    while pauses:
                        if not self.is_frozen:
                            self.call_from_thread(self.show_snapshot, look(begin))
                        pauses = self._pause_looking(self._options.every_seconds)
            except Exception as error:  # noqa: BLE001  # any error of the database is shown, and the query repeated
                pauses = self._pause_looking(0.0)
                if pauses:
                    self.call_from_thread(self._show_trouble, error)
                    pauses = self._pause_looking(_PAUSE_SECONDS)

    @work(thread=True)
    def _examine_always(self) -> None:
        pauses = True
        while pauses:
            try:
                said = _found(self._options)
            except Exception as error:  # noqa: BLE001  # any error of the database is shown, and the query repeated
                said = f"{type(error).__name__}; looking again in a minute"
            if self._pause_looking(0.0):
                self.call_from_thread(self._say, "#findings", Text(said))
            pauses = self._pause_looking(_DOCTOR_SECONDS)

    @staticmethod
    def _pause_looking(seconds: float) -> bool:
        """Wait for these seconds between two queries of the database; called in the thread that makes the queries.

        Return False if the screen has been closed, so that the thread ends too.
        """
        worker, end = get_current_worker(), time.monotonic() + seconds
        while not worker.is_cancelled:
            left = end - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(0.1, left))
        return False

    def _show_trouble(self, error: Exception) -> None:
        said = str(error) if isinstance(error, OutboxqError) else f"{type(error).__name__}; looking again"
        self._say("#summary", Text(printable(said), style="red"))

    def _say(self, line: str, said: Text) -> bool:
        """Show a text in the widget that `line` selects, such as `#summary`; return False if the screen was closed."""
        lines = list(self.query(line).results(Static))
        for each in lines:
            each.update(said)
        return bool(lines)

    def show_snapshot(self, snapshot: "Snapshot") -> None:
        """Fill every table with the rows of the snapshot; the selected row of each table stays selected."""
        self._snapshot = snapshot
        said = "; ".join((f"{snapshot.at:%H:%M:%S} UTC, {summary(snapshot)}", *not_known(snapshot)))
        if self._say("#summary", Text(printable(said))):
            for view in VIEWS:
                self._fill(view)

    def _fill(self, view: View) -> None:
        if self._snapshot is None:
            return
        now = self._snapshot.at
        rows = list(view.rows(self._snapshot))
        shown = [each for each in view.columns if each.if_empty or any(getattr(row, each.name) for row in rows)]
        rows = [row for row in rows if self._matches(row, shown)]
        if view.name in self._sorted:
            name, backwards = self._sorted[view.name]
            rows.sort(key=lambda row: _sort_key(getattr(row, name)), reverse=backwards)
        table = self._table(view)
        before = self._key_under_cursor(view)
        self._rows[view.name] = rows
        table.clear(columns=True)
        numbers = {each.name for each in shown if is_number([getattr(row, each.name) for row in rows])}
        for each in shown:
            table.add_column(self._heading(view, each), key=each.name)
        for row in rows:
            cells = (_cell(each, getattr(row, each.name), now, is_number=each.name in numbers) for each in shown)
            table.add_row(*cells)
        keys = [_key(view, row) for row in rows]
        if before in keys:
            table.move_cursor(row=keys.index(before), animate=False)

    def _matches(self, row: object, shown: Sequence[Column]) -> bool:
        texts = (in_full(getattr(row, each.name)) for each in shown)
        return not self._filter or any(self._filter.lower() in text.lower() for text in texts)

    def _heading(self, view: View, column: Column) -> Text:
        name, backwards = self._sorted.get(view.name, ("", False))
        arrow = (" ▼" if backwards else " ▲") if name == column.name else ""
        return Text(f"{column.heading}{arrow}")

    @property
    def _view(self) -> View | None:
        """The description of the table in the active tab; None for the doctor's tab, which has no rows."""
        active = self.query_one(TabbedContent).active
        return next((view for view in VIEWS if view.name == active), None)

    def _table(self, view: View) -> "DataTable[Text]":
        table: DataTable[Text] = self.query_one(f"#{view.name}", TabPane).query_one(DataTable)
        return table

    def _key_under_cursor(self, view: View) -> tuple[object, ...] | None:
        rows, at = self._rows[view.name], self._table(view).cursor_row
        return _key(view, rows[at]) if at < len(rows) else None

    @property
    def _row(self) -> Any | None:
        view = self._view
        if view is None:
            return None
        rows, at = self._rows[view.name], self._table(view).cursor_row
        return rows[at] if at < len(rows) else None

    def action_sort(self) -> None:
        """The key s: sort the table by its next column; after the last one, restore the order of the snapshot."""
        view = self._view
        if view is None:
            return
        names = ["", *(str(column.value) for column in self._table(view).columns)]
        name = names[(names.index(self._sorted.get(view.name, ("", False))[0]) + 1) % len(names)]
        if name:
            self._sorted[view.name] = name, False
        else:
            self._sorted.pop(view.name, None)
        self._fill(view)

    def action_reverse(self) -> None:
        """The key r: reverse the order of a table that is sorted."""
        view = self._view
        if view is not None and view.name in self._sorted:
            name, backwards = self._sorted[view.name]
            self._sorted[view.name] = name, not backwards
            self._fill(view)

    def action_filter(self) -> None:
        """The key /: show the field for a text that rows have to contain."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_leave_filter(self) -> None:
        """The key Escape: clear the filter, and show all rows again."""
        self.query_one("#filter", Input).value = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Called by Textual at each key in the field of the filter: show only rows that contain the text."""
        self._filter = event.value
        for view in VIEWS:
            self._fill(view)

    def on_input_submitted(self) -> None:
        """Called by Textual at Enter in the field of the filter: go back to the table."""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).set_class(bool(self._filter), "shown")
        if self._view is not None:
            self._table(self._view).focus()

    def on_data_table_row_selected(self) -> None:
        """Called by Textual at Enter on a row: show all values of the row."""
        view, row = self._view, self._row
        if view is not None and row is not None:
            names = dict.fromkeys([*(each.name for each in view.columns), *_names(row)])
            values = {name: in_full(getattr(row, name)) for name in names}
            width = max(map(len, values))
            self.push_screen(Detail("\n".join(f"{name:<{width}}  {value}" for name, value in values.items() if value)))

    def action_freeze(self) -> None:
        """The key Space: stop the queries, or start them again."""
        self.is_frozen = not self.is_frozen
        self.notify("Frozen: Space looks again." if self.is_frozen else "Looking again.")

    def action_explain(self) -> None:
        """The key e: show the reasons why the queue or the job in the selected row does not run."""
        view, row = self._view, self._row
        if view is not None and row is not None and hasattr(row, "queue"):
            self._explain(row.queue, row.id if view.name == "running" else None)

    @work(thread=True, exclusive=True, group="actions")
    def _explain(self, queue: str, job_id: UUID | None) -> None:
        from outboxq.admin.explain import explain_job, explain_queue

        try:
            with self._options.transaction() as connection:
                found = explain_queue(connection, queue) if job_id is None else explain_job(connection, job_id)
        except Exception as error:
            # A refusal by the database or a check is shown, and the screen goes on; a bug ends it with its traceback.
            if not self._is_told(error):
                raise
            return
        self.call_from_thread(self.push_screen, Detail(_explained(found, queue if job_id is None else str(job_id))))

    def action_pause(self) -> None:
        """The key p: pause the queue in the selected row, or resume it, after a question."""
        view, row = self._view, self._row
        if view is None or view.name != "queues" or row is None:
            return
        verb = "Pause" if row.paused_at is None else "Resume"

        def answered(yes: bool | None) -> None:
            if yes:
                self._pause(row.queue, verb)

        self.push_screen(
            Detail(f"{verb} queue {printable(row.queue)}?  y: yes, any other key: no", asks=True), answered
        )

    @work(thread=True, exclusive=True, group="actions")
    def _pause(self, queue: str, verb: str) -> None:
        from outboxq import config
        from outboxq.admin.actions import Actions, Actor

        try:
            actions = Actions(Actor(config.actor_name(), via="cli"), "by a key of outboxq top", warn=self._warn)
            change = actions.pause_queues if verb == "Pause" else actions.resume_queues
            with self._options.transaction() as connection:
                changed = change(connection, [queue])
        except Exception as error:
            # A refusal, such as that of a role that may only read, is shown; a bug ends the screen with its traceback.
            if not self._is_told(error):
                raise
            return
        said = f"{verb}d {queue}." if changed else f"{queue} was {verb.lower()}d already."
        self.call_from_thread(self.notify, printable(said), markup=False)

    def _is_told(self, error: Exception) -> bool:
        """Show the user the message of an error that refused an action, and return True.

        Return False for any other error, which is a bug.
        """
        known = explain(error)
        if known is not None:
            self.call_from_thread(self.notify, printable(known.message), severity="error", markup=False)
        return known is not None

    def _warn(self, said: str) -> None:
        self.call_from_thread(self.notify, printable(said), severity="warning", markup=False)


def show_top(options: TopOptions) -> None:
    """Run the screen of `outboxq top` until its user quits."""
    Top(options).run()


def _key(view: View, row: object) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in view.key)


def _names(row: object) -> Sequence[str]:
    names: Sequence[str] = getattr(row, "__slots__", None) or list(vars(row))
    return names


def _sort_key(value: object) -> tuple[int, Any]:
    """Return a key to sort values by: numbers first, by size, then texts by the alphabet, and empty values last."""
    if value is None or value == ():
        return (2, 0)
    return (0, value) if isinstance(value, int | float) else (1, in_full(value))


def _cell(column: Column, value: object, now: datetime, *, is_number: bool) -> Text:
    return Text(column.cell(value, now), justify="right" if is_number else "left")


def _explained(found: "Explanation", what: str) -> str:
    lines = [f"Why {printable(what)} does not run:", ""]
    for reason in found.reasons:
        lines += [f"{reason.code}: {printable(reason.text)}", f"  {printable(reason.advice)}", ""]
    return "\n".join(lines)


def _found(options: TopOptions) -> str:
    """Run the doctor, and return its findings as text."""
    from outboxq.cli.doctor import DoctorOptions, examine

    asked = DoctorOptions(schema=options.schema, database_url=[options.database_url] if options.database_url else None)
    lines = []
    for finding in next(iter(examine(asked).values())):
        lines += [
            f"{finding.severity}: {finding.code}: {printable(finding.title)}",
            f"  {printable(finding.advice)}",
            "",
        ]
    return "\n".join(lines) or "Nothing found: all is well."
