"""Names, keys, errors and reasons that are made to break out of a page: they are text, wherever they stand."""

import re
from html import unescape

import pytest
from sqlalchemy import Engine, text

from outboxq.dashboard import Link, Role, create_app
from outboxq.dashboard.segments import as_segment, name_in
from outboxq.errors import ConfigError
from tests.support.dashboard import (
    ORIGIN,
    as_user,
    client_of,
    screens,
    stage_actions,
    stage_dashboard,
    token_for,
)
from tests.support.hostile import Tags
from tests.support.matrices import sampled
from tests.support.posted import FORMS, PREVIEWS, preview, refused

# Names take 63 bytes, and no control characters.
NAMES = (
    '"><script>alert(1)</script>',
    "'><img src=x onerror=alert(1)>",
    "</title></style><svg/onload=alert(1)>",
    "{{7*7}}{%raw%}${7*7}<%=7*7%>",
    "javascript:alert(1)",
    "..",
    "../../etc/passwd",
    "a/b?c#d&e;f%2e%2e",
    "\u202eevil\u2066 name",
)
_UPDATES = """
UPDATE outboxq.job SET kind = :name, queue = :q, args = jsonb_build_object(:name, :text);
UPDATE outboxq.dead_job SET kind = :name, queue = :q, reason = :text, errors = jsonb_build_array(jsonb_build_object(
  'attempt', 1, 'at', :text, 'type', :text, 'message', :text,
  'where', jsonb_build_array(:text)));
UPDATE outboxq.done_job SET kind = :name, queue = :q;
UPDATE outboxq.effect SET error = :text, scope = :name || scope, key = :name || key;
UPDATE outboxq.inbox SET consumer = :name || consumer, message_id = :name || message_id;
UPDATE outboxq.schedule SET name = :name || name, kind = :name, queue = :q, owner = :name, declared = true,
  paused_at = now(), disabled_at = now();
UPDATE outboxq.relay_status SET host = :text, version = :text, queues = ARRAY[:q],
  kinds = ARRAY[:name], running = jsonb_build_array(jsonb_build_object('id', gen_random_uuid(),
  'queue', :q, 'kind', :name, 'attempt', 1, 'seconds', 9.0, 'pid', 1));
UPDATE outboxq.stat SET kind = :name || kind, queue = :q;
ALTER TABLE outboxq.audit DISABLE TRIGGER USER;
UPDATE outboxq.audit SET actor = :text, role = :text, target = :text, reason = :text, error = :text,
  filter = jsonb_build_object('x', :text), action = :name;
UPDATE outboxq.paused_kind SET kind = :name, queue = :q;
UPDATE outboxq.queue SET name = left(:q, 40) || name"""


def _spoil(engine: Engine, name: str) -> None:
    """Put a name wherever a text of others may stand."""
    short = name.encode()[:60].decode(errors="ignore")
    values = {"name": short, "text": f"{name} {name}", "q": short.replace(",", "").replace("=", "").replace("*", "")}
    with engine.begin() as connection:
        for update in re.sub(r":(name|q|text)\b", r"CAST(:\1 AS text)", _UPDATES).split(";"):
            connection.execute(text(update), {key: value for key, value in values.items() if f":{key}" in update})


# Those that mean something at the beginning of a text begin one; the others are as dangerous behind one another.
_JOINED = ('"><script>' + NAMES[3], NAMES[6] + NAMES[7], NAMES[1] + NAMES[8], NAMES[2], NAMES[4], NAMES[5])


# A tag with a template; a crawl for each of the others is wide.
@pytest.mark.wide
@pytest.mark.parametrize("name", sampled(_JOINED))
def test_a_hostile_name_is_text_on_every_page(name: str, engine: Engine) -> None:
    """Every list, and every page that a list leads to, has the tags that it is to have, and links of its own alone."""
    stage_dashboard(engine)
    _spoil(engine, name)
    app = create_app({"orders": engine}, auth=as_user(Role.ADMIN, name), environment=name, title=name)
    seen: set[str] = set()
    todo = [f"/orders/{screen.path}" for screen in screens() if "{" not in screen.path]
    with client_of(app) as client:
        while todo and len(seen) < 80:
            path = todo.pop(0)
            if path in seen:
                continue
            seen.add(path)
            page = client.get(path)
            assert page.status_code in (200, 303, 404), (path, page.text[-300:])
            tags = Tags(page.text)
            assert not tags.problems, path
            for link in tags.links:
                target = str(page.url.join(link)).removeprefix("http://ops.test")
                if target.startswith("/orders/") and "?" not in target:
                    todo.append(target)
                else:
                    assert target.startswith(("/static/", "/orders/", "/logout")) or target == "/", target
    assert len(seen) > 25


@pytest.mark.wide
@pytest.mark.parametrize("name", sampled(_JOINED, 2))
def test_a_hostile_text_is_text_in_what_answers_to_a_form(name: str, engine: Engine) -> None:
    """Each form that is refused shows what was filled in, and each preview says what was asked for."""
    stage_actions(engine)
    with client_of(create_app({"orders": engine}, auth=as_user(Role.ADMIN), payloads="shown")) as client:
        token = token_for(client)
        previews = [preview(what, queue=name, kind=name, error=name, group=name) for what in PREVIEWS]
        for posted in [*(refused(action, name) for action in FORMS), *previews]:
            form = {**posted.fields, "csrf": token}
            answer = client.post(posted.path, data=form, headers={"origin": ORIGIN})
            tags = Tags(answer.text)
            assert (answer.status_code, tags.problems) == (posted.status, []), posted.path
            assert name[-5:] in unescape(answer.text), posted.path


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_path_comes_back(name: str) -> None:
    """Whatever it is, it is one part of a path that nothing takes for another one."""
    segment = as_segment(name)
    assert re.fullmatch(r"~?[A-Za-z0-9_-][A-Za-z0-9_.-]*", segment)
    assert name_in(segment) == name


def test_a_link_to_another_system_is_one(engine: Engine) -> None:
    """A hook of the application's makes no link of another sort."""
    assert Link("traces", "https://traces.example.com/7").url
    for url in ("javascript:alert(1)", "data:text/html,x", "//evil.test", "ftp://x"):
        with pytest.raises(ConfigError):
            Link("traces", url)


_QUERIES = (
    "limit=0", "limit=201", "limit=x", "before=x", "state=nope", "queue=%00", f"kind={'x' * 64}", "q=nocolon",
    f"q={'a' * 201}", "&".join(f"x{number}=1" for number in range(60)),
)  # fmt: skip


@pytest.mark.parametrize("query", _QUERIES)
def test_a_parameter_out_of_its_bounds_is_refused(query: str, engine: Engine) -> None:
    """Each is read by one typed parser, and what it may not be is 400, never an error of ours."""
    with client_of(create_app({"orders": engine}, auth=as_user(Role.READER))) as client:
        assert client.get(f"/orders/jobs?{query}").status_code == 400
