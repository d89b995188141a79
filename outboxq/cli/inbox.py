"""`outboxq inbox`."""

from dataclasses import asdict
from typing import Annotated

import typer

from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, ConsumerFilter, DatabaseUrl, Limit, Schema, Since
from outboxq.cli.output import notice, print_fields, print_json, print_list
from outboxq.codec.text import several

app = typer.Typer(
    help="List, show and forget messages that were accepted.", no_args_is_help=True, rich_markup_mode=None
)

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", show_default=False)]
MessageId = Annotated[str, typer.Argument(metavar="MESSAGE_ID", show_default=False)]
MessageIds = Annotated[list[str], typer.Argument(metavar="MESSAGE_ID", show_default=False)]


@app.command("list")
def list_messages(
    consumer: ConsumerFilter = None,
    since: Since = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
    """List accepted messages, first those that are remembered longest: of one consumer, the latest.

    A message is remembered by its id and a fingerprint of its content, without the content.

    \b
    Examples:
      outboxq inbox list --consumer payments
      outboxq inbox list --since 2026-01-31T08:00:00 --json
    """
    from outboxq.admin import messages
    from outboxq.cli.database import open_database

    wanted = messages.MessageFilter(consumer=consumer, since=since)
    with open_database(database_url, schema) as begin, begin() as connection:
        found = messages.list_messages(connection, wanted, limit=limit + 1)
    columns = ("consumer", "message_id", "seen_at", "expires_at")
    print_list("messages", found, limit, columns, "--consumer or --since", as_json=as_json)


@app.command("show")
def show_message(
    consumer: Consumer,
    message_id: MessageId,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
    """Show when one message was accepted, and until when it is remembered.

    \b
    Example:
      outboxq inbox show payments evt_1Nq2
    """
    from outboxq.admin import messages
    from outboxq.cli.database import open_database

    with open_database(database_url, schema) as begin, begin() as connection:
        found = messages.show_message(connection, consumer, message_id)
    if as_json:
        print_json(found)
    else:
        print_fields(asdict(found).items())


@app.command("forget")
def forget_messages(
    consumer: Consumer,
    message_ids: MessageIds,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
    """Forget messages, so that they are accepted again if they are delivered again.

    What they led to stays: the consumer will do its work for such a message a second time. A message that another
    transaction has locked is not waited for. The exit code is 1 if one was locked, or was not there.

    \b
    Examples:
      outboxq inbox forget payments evt_1Nq2
      outboxq inbox forget payments evt_1Nq2 evt_1Nq3 --json
    """
    from outboxq.admin import messages
    from outboxq.cli.database import open_database

    with open_database(database_url, schema) as begin, begin() as connection:
        result = messages.forget_messages(connection, consumer, message_ids)
    if as_json:
        print_json(result)
    elif result.forgotten:
        number = several(len(result.forgotten), "message", "messages")
        typer.echo(f"forgot {number}: accepted again when delivered again")
    else:
        typer.echo("forgot nothing")
    for message_id in result.not_found:
        notice(f"no message {message_id!r} of consumer {consumer!r}")
    for message_id in result.held:
        notice(f"not forgotten, because another transaction holds it: {message_id!r}")
    raise typer.Exit(1 if result.not_found or result.held else 0)
