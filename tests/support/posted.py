"""Pages that answer to a form: previews of changes of many rows, and forms that were refused."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from playwright.sync_api import Page
from sqlalchemy import Engine, text

from outboxq.dashboard.route import Action
from outboxq.dashboard.routes import ACTIONS
from outboxq.dashboard.segments import as_segment
from tests.support.dashboard import ACTION_FIELDS, ACTION_PATHS, action_path
from tests.support.hostile_rows import PAYLOADS, as_name, as_queue, as_text, hostile_id
from tests.support.staged import numbered

FORMS = tuple(action for action in ACTIONS if action.form is not None)
# Each change of many rows that can be previewed, with the fields that it takes besides a filter.
PREVIEWS: Mapping[str, Mapping[str, str]] = {
    "dead.retry": {},
    "dead.discard": {},
    "job.cancel": {},
    "job.cancel_running": {"outcome": "dead"},
    "job.run_now": {},
    "job.priority": {"priority": "7"},
    "job.run_at": {"run_at": "2030-01-31T08:00:00Z"},
}
_SEND = """([address, fields]) => {
  const form = document.createElement("form");
  form.method = "post";
  form.action = address;
  for (const [name, value] of fields) {
    const input = document.createElement("input");
    input.type = "hidden";
    input.name = name;
    input.value = value;
    form.append(input);
  }
  document.body.append(form);
  form.submit();
}"""


@dataclass(frozen=True, slots=True)
class Posted:
    """A form that is sent: its path below the dashboard, its fields without the token, and the status of its answer."""

    path: str
    fields: Mapping[str, str]
    status: int


def send(page: Page, root: str, posted: Posted) -> None:
    """Send a form as a page of the dashboard would, and wait for the page that answers it.

    The browser has to be on a page of the dashboard.
    """
    token: str = page.request.get(f"{root}/token").json()["token"]
    fields = [*posted.fields.items(), ("csrf", token)]
    with page.expect_navigation() as answer:
        page.evaluate(_SEND, [f"{root}{posted.path}", fields])
    assert answer.value is not None
    assert answer.value.status == posted.status, (posted, page.content()[:2_000])


def preview(what: str, **filtered: str) -> Posted:
    """The preview of a change of many rows."""
    return Posted("/orders/bulk/preview", {"what": what, **PREVIEWS[what], **filtered}, 200)


def refused(action: Action, fill: str, names: Mapping[str, str | Mapping[str, str]] = ACTION_PATHS) -> Posted:
    """A form of an action with this in every field, which is refused, as no reason is that long."""
    fields = dict.fromkeys(ACTION_FIELDS[action.path], fill)
    return Posted(action_path(action, names=names), {**fields, "reason": fill * 501}, 400)


def every_answer() -> Iterator[Posted]:
    """Each preview, with rows and without any, and each form as it is refused, of what `stage_actions` has."""
    for what in PREVIEWS:
        yield preview(what)
        yield preview(what, kind="nothing_of_this_kind")
    yield preview("dead.retry", of="selected", id=str(numbered(101)))
    yield Posted("/orders/bulk/preview", {"what": "dead.retry", "of": "selected"}, 400)
    for action in FORMS:
        yield refused(action, "no")


def hostile_answers(engine: Engine) -> Iterator[Posted]:
    """Each payload as a filter of previews, and in an eighth of the forms; the next seven payloads have the rest."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT actor, id FROM outboxq.audit"))
        entries = {str(row.actor): str(row.id) for row in rows}
    for number, payload in enumerate(PAYLOADS, 1):
        queue, kind, said = as_queue(payload), as_name(payload), as_text(payload)
        whats = list(PREVIEWS)
        yield preview(whats[number % 2], queue=queue, kind=kind, error=said)
        yield preview("dead.retry", queue=queue, kind=kind, error=said, contains=said)
        yield preview(whats[2 + number % 5], queue=queue, kind=kind)
        yield preview(whats[2 + number % 5], queue=queue, kind=kind, group=said)
        for action in FORMS[number % 8 :: 8]:
            yield refused(action, said, _hostile_names(number, payload, entries[said]))


def _hostile_names(number: int, payload: str, entry: str) -> dict[str, str | Mapping[str, str]]:
    """What paths name, by the rows of a payload."""
    kind, said = as_segment(as_name(payload)), as_segment(as_text(payload))
    return {
        "{job_id}": {of: str(hostile_id(of, number)) for of in ("jobs", "dead", "done")},
        "{queue}": as_segment(as_queue(payload)),
        "{kind}": kind,
        "{name}": kind,
        "{scope}": said,
        "{key}": said,
        "{consumer}": kind,
        "{message_id}": said,
        "{entry}": entry,
    }
