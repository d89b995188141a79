"""`outboxq inbox`: list, show and forget accepted messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.help import Commands
from outboxq.cli.options import ActingOptions, Since, only, since_in, since_option, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.reading import lists, shows
from outboxq.cli.tables import Column
from outboxq.codec.text import several

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = Commands(help="List, show and forget messages that were accepted.")

Consumer = Annotated[
    str, typer.Argument(metavar="CONSUMER", help="The name of the `Inbox` that accepted it.", show_default=False)
]
MessageId = Annotated[
    str, typer.Argument(metavar="MESSAGE_ID", help="Its id, as `list` prints it.", show_default=False)
]


@app.command("list")
@lists(
    "messages",
    (
        Column("consumer", "id"),
        Column("message_id", "id"),
        Column("seen_at", rank=1),
        Column("expires_at", rank=2),
        Column("fingerprint", "id", rank=3),
    ),
    "--consumer or --since",
)
def list_messages(
    connection: "Connection",
    consumer: Annotated[str | None, only("consumer")] = None,
    since: Annotated[Since | None, since_option("Only messages accepted since")] = None,
    *,
    limit: int,
) -> Sequence[object]:
    """List accepted messages, latest expiry first.

    A message is remembered by its id and a fingerprint of its content, without the content.

    \b
    Examples:
      outboxq inbox list --consumer payments
      outboxq inbox list --since 24h
      outboxq inbox list --since 2026-01-31T08:00:00 --json
    """
    from outboxq.admin import messages

    accepted_since = since_in(connection, since)
    wanted = messages.MessageFilter(consumer=consumer, since=accepted_since)
    return messages.list_messages(connection, wanted, limit=limit)


@app.command("show")
@shows
def show_message(connection: "Connection", consumer: Consumer, message_id: MessageId) -> object:
    """Show when one message was accepted, and until when it is remembered.

    \b
    Example:
      outboxq inbox show payments evt_1Nq2
    """
    from outboxq.admin import messages

    return messages.show_message(connection, consumer, message_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetOptions(ActingOptions):
    """The options of `outboxq inbox forget`."""

    consumer: Consumer
    message_ids: Annotated[
        list[str], typer.Argument(metavar="MESSAGE_ID", help="Their ids, as `list` prints them.", show_default=False)
    ]


@app.command("forget")
@takes(ForgetOptions)
def forget_messages(options: ForgetOptions) -> None:
    """Forget messages, so that they are accepted again if they are delivered again.

    What they led to stays: the consumer will do its work for such a message a second time. A message that another
    transaction has locked is not waited for. The exit code is 1 if one was locked, or was not there.

    \b
    Examples:
      outboxq inbox forget payments evt_1Nq2
      outboxq inbox forget payments evt_1Nq2 evt_1Nq3 --json
    """
    with options.transaction() as connection:
        result = options.actions().forget_messages(connection, options.consumer, options.message_ids)
    if options.as_json:
        print_json(result)
    elif result.forgotten:
        number = several(len(result.forgotten), "message", "messages")
        typer.echo(f"forgot {number}: accepted again when delivered again")
    else:
        typer.echo("forgot nothing")
    for message_id in result.not_found:
        notice(f"no message {message_id!r} of consumer {options.consumer!r}")
    for message_id in result.held:
        notice(f"not forgotten, because another transaction holds it: {message_id!r}")
    raise typer.Exit(1 if result.not_found or result.held else 0)
