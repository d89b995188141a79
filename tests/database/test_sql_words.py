"""The words that an SQL text begins with are read as PostgreSQL reads them, in time linear in the text."""

import pytest
from sqlalchemy import text

from outboxq.database.sql_text import first_word, leading_words, refused_verb, without_literals
from outboxq.errors import DeferError
from outboxq.handlers.deferred import checked_write
from tests.support.growth import LINEAR, growth

HOSTILE = {
    "blanks": " ",
    "lines": "\n        ",
    "comments": "/**/",
    "comments and blanks": "/* x */ \n",
    "comments that are never closed": "/* ",
    "stars": "/*" + "*" * 50,
    "line comments": "-- x\n",
    "line comments without an end": "--",
    "blank line comments": "-- \n ",
}


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("INSERT INTO a VALUES (1)", "INSERT"),
        ("\n\t update\ra SET b = 1", "UPDATE"),
        ("-- one\n-- two\r\n /* three */delete FROM a", "DELETE"),
        ("/* /* comments nest */ SELECT */ UPDATE a SET b = 1", "UPDATE"),
        ("/*/ still one */ MERGE INTO a", "MERGE"),
        ("/***/WITH a AS (SELECT 1) SELECT 2", "WITH"),
        ("-- ends at a carriage return\rCOMMIT", "COMMIT"),
        ("withdraw()", "WITHDRAW"),
        ("INSERT$ x", "INSERT$"),
        ("(SELECT 1)", ""),
        ("'INSERT'", ""),
        ("-- nothing else", ""),
        ("/* not closed INSERT", ""),
        ("\N{NO-BREAK SPACE}INSERT", "\N{NO-BREAK SPACE}INSERT"),
        ("", ""),
    ],
)
def test_the_first_word_is_the_one_that_the_server_sees(sql: str, word: str) -> None:
    """White space and comments as in PostgreSQL's lexer: comments nest, a no-break space is part of a name."""
    assert first_word(sql) == word


def test_the_words_end_at_the_first_thing_that_is_none() -> None:
    """Comments between them are passed over too."""
    assert list(leading_words("prepare/**/ Transaction 'x' COMMIT")) == ["PREPARE", "TRANSACTION"]


@pytest.mark.parametrize(
    ("sql", "verb"),
    [
        ("COMMIT", "COMMIT"),
        ("-- a\r end work", "END"),
        ("begin;", "BEGIN"),
        ("START /* x */ TRANSACTION", "START TRANSACTION"),
        ("PREPARE -- x\n TRANSACTION 'a'", "PREPARE TRANSACTION"),
        ("PREPARE find AS SELECT 1", None),
        ("ROLLBACK", "ROLLBACK"),
        ("ROLLBACK AND CHAIN", "ROLLBACK"),
        ("ROLLBACK WORK", "ROLLBACK"),
        ("ROLLBACK TO a", None),
        ("ROLLBACK /* x */ WORK TO SAVEPOINT a", None),
        ("ROLLBACK TRANSACTION TO a", None),
        ("SAVEPOINT a", None),
        ("ENDING", None),
        ("UPDATE a SET b = 'COMMIT'", None),
    ],
)
def test_a_transaction_verb_is_found_behind_and_between_comments(sql: str, verb: str | None) -> None:
    """What ends the relay's transaction is refused however it is spelled; savepoints are the handler's own."""
    assert refused_verb(sql) == verb


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELECT 'COMMIT', 'it''s; COMMIT' FROM a", "SELECT  ,    FROM a"),
        ("SELECT E'it\\'s; COMMIT', 1", "SELECT  , 1"),
        ("SELECT name'x' FROM \"COMMIT; \"", "SELECT name  FROM  "),
        ("DO $$ COMMIT; $$; COMMIT", "DO  ; COMMIT"),
        ("DO $a$ $$ $b$ COMMIT; $a$; COMMIT", "DO  ; COMMIT"),
        ("SELECT $1, a$b$c, $2", "SELECT $1, a$b$c, $2"),
        ("COMMIT -- ; x\n; /* /* COMMIT */ */ END", "COMMIT  \n;   END"),
        ("SELECT 'not closed; COMMIT", "SELECT  "),
        ("/* not closed COMMIT", " "),
    ],
)
def test_literals_names_and_comments_are_no_code(sql: str, code: str) -> None:
    """A verb in them is none."""
    assert without_literals(sql) == code


OPEN = {"quotes": "'", "escapes": "E'\\", "dollars": "$", "names": "a$", "words": "word ", "tags": "$a", "double": '"'}


@pytest.mark.first_and_last
@pytest.mark.parametrize("unit", {**HOSTILE, **OPEN}.values(), ids={**HOSTILE, **OPEN})
def test_literals_are_found_in_linear_time(unit: str) -> None:
    """Also if none of them is closed."""
    assert growth(without_literals, lambda size: unit * size, 300) < LINEAR


def test_tags_that_are_never_closed_are_found_in_linear_time() -> None:
    """Each one is looked for once."""
    build = lambda size: " ".join(f"$a{number}$" for number in range(size))  # noqa: E731
    assert growth(without_literals, build, 300) < LINEAR


@pytest.mark.first_and_last
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("end", ["", "SELECT 1", "INSERT"])
def test_a_text_is_read_in_linear_time(unit: str, end: str) -> None:
    """Whatever lies before the verb: 32 times the text takes about 32 times as long, and not for ever."""
    assert growth(first_word, lambda size: unit * size + end, 300) < LINEAR
    assert growth(refused_verb, lambda size: f"PREPARE {unit * size} {end}", 300) < LINEAR


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_a_deferred_text_that_does_not_write_is_refused_without_delay(unit: str) -> None:
    """24 blanks of indentation took half a minute, with the interpreter's lock held."""
    with pytest.raises(DeferError, match="begins with INSERT"):
        checked_write(text(unit * 2_000 + "\nSELECT 1"), None)
