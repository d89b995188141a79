"""Mapped classes of every sort that changes what a session must do: each has `id` and `value`, and one thing more."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    CHAR,
    JSON,
    CheckConstraint,
    Column,
    Computed,
    FetchedValue,
    ForeignKey,
    Identity,
    Integer,
    MetaData,
    Numeric,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
    event,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    column_property,
    composite,
    deferred,
    mapped_column,
    reconstructor,
    relationship,
    validates,
)


class Base(DeclarativeBase):
    type_annotation_map = {dict[str, Any]: JSONB}  # noqa: RUF012  # SQLAlchemy's way


class Account(Base):
    """Plain columns alone, of types that the database rounds, pads and keeps as documents."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    label: Mapped[str | None] = mapped_column(String(20))
    price: Mapped[Decimal | None] = mapped_column(Numeric(8, 1))
    code: Mapped[str | None] = mapped_column(CHAR(4))
    document: Mapped[dict[str, Any] | None] = mapped_column(JSON)

    @hybrid_property
    def is_rich(self) -> bool:
        return self.value > 40


class Branch(Base):
    """The plainest: other tables' triggers and listeners change it."""

    __tablename__ = "branch"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Pair(Base):
    """A key of two columns."""

    __tablename__ = "pair"
    id: Mapped[int] = mapped_column(primary_key=True)
    side: Mapped[str] = mapped_column(primary_key=True, default="l")
    value: Mapped[int] = mapped_column(default=0)


class SameAccount(Base):
    """A second class for the rows of `account`."""

    __table__ = Account.__table__
    __mapper_args__ = {"include_properties": ("id", "value", "label")}  # noqa: RUF012


class AccountView(Base):
    """A third one, through a view that can be written to."""

    __table__ = Table(
        "account_view", MetaData(), Column("id", Integer, primary_key=True), Column("value", Integer, default=0)
    )


class Till(Base):
    """A trigger adds what its value grows by to its branch."""

    __tablename__ = "till"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    branch_id: Mapped[int | None] = mapped_column(ForeignKey("branch.id", ondelete="CASCADE"), default=1)


class Stamped(Base):
    """A trigger counts its changes in the row itself: once declared, once behind SQLAlchemy's back."""

    __tablename__ = "stamped"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    told: Mapped[int] = mapped_column(server_default="0", server_onupdate=FetchedValue())
    untold: Mapped[int] = mapped_column(default=0)


class Ruled(Base):
    """A rule adds one to the first branch at each change."""

    __tablename__ = "ruled"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Versioned(Base):
    __tablename__ = "versioned"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class Figured(Base):
    """What the server works out: a generated column, a default, expressions of this row and of other tables."""

    __tablename__ = "figured"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    double: Mapped[int] = mapped_column(Computed("value * 2", persisted=True))
    extra: Mapped[int] = mapped_column(server_default="7")
    memo: Mapped[str | None] = deferred(mapped_column(String(20)))


class Summed(Base):
    """An attribute that is read from other tables, with the row."""

    __tablename__ = "summed"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    accounts = column_property(select(func.sum(Account.value)).scalar_subquery())


class Touched(Base):
    """Columns with an `onupdate`: a function of Python's, and an expression."""

    __tablename__ = "touched"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    by: Mapped[str] = mapped_column(String(10), default="seed", onupdate=lambda: "python")
    changes: Mapped[int] = mapped_column(default=0, onupdate=literal_column("touched.changes + 1"))


class Purse(Base):
    """Constraints: CHECK, unique, unique and a foreign key that are checked at COMMIT."""

    __tablename__ = "purse"
    __table_args__ = (
        CheckConstraint("value >= 0", name="purse_not_negative"),
        UniqueConstraint("label", name="purse_label"),
        UniqueConstraint("place", name="purse_place", deferrable=True, initially="DEFERRED"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    label: Mapped[str | None] = mapped_column(String(20))
    place: Mapped[int | None] = mapped_column()
    branch_id: Mapped[int | None] = mapped_column(
        ForeignKey("branch.id", ondelete="SET NULL", deferrable=True, initially="DEFERRED")
    )


class Parent(Base):
    """A collection with delete-orphan, which SQLAlchemy cascades."""

    __tablename__ = "parent"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    children: Mapped[list["Child"]] = relationship(
        cascade="all, delete-orphan", order_by="Child.id", back_populates="parent"
    )


class Child(Base):
    __tablename__ = "child"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("parent.id"))
    parent: Mapped[Parent | None] = relationship(back_populates="children")


class Leaf(Base):
    """Deleted with its account, by the database. SQLAlchemy watches its document, by a listener at loading."""

    __tablename__ = "leaf"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    settings: Mapped[dict[str, Any] | None] = mapped_column(MutableDict.as_mutable(JSONB))
    account_id: Mapped[int | None] = mapped_column(ForeignKey("account.id", ondelete="CASCADE"), default=1)


class Ticket(Base):
    """Loaded together with its account."""

    __tablename__ = "ticket"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    account_id: Mapped[int | None] = mapped_column(ForeignKey("account.id", ondelete="SET NULL"))
    account: Mapped[Account | None] = relationship(lazy="joined")


class Animal(Base):
    __tablename__ = "animal"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    sort: Mapped[str] = mapped_column(String(10))
    __mapper_args__ = {"polymorphic_on": sort, "polymorphic_identity": "animal"}  # noqa: RUF012


class Dog(Animal):
    """In a table of its own beside its base's."""

    __tablename__ = "dog"
    id: Mapped[int] = mapped_column(ForeignKey("animal.id", ondelete="CASCADE"), primary_key=True)
    tricks: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012


class Cat(Animal):
    """In its base's table."""

    lives: Mapped[int | None] = mapped_column(default=9)
    __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012


class Heard(Base):
    """Listeners: one changes the row before it is sent, one sends SQL after, one at loading, one at assigning."""

    __tablename__ = "heard"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    heard: Mapped[int] = mapped_column(default=0)
    loaded_with = None

    @reconstructor
    def note_value(self) -> None:
        self.loaded_with = self.__dict__.get("value")

    @validates("value")
    def keep_small(self, _key: str, value: Any) -> Any:
        return min(value, 90) if isinstance(value, int) else value


@event.listens_for(Heard, "before_update")
def _count(_mapper: object, _connection: object, target: Heard) -> None:
    target.heard = target.heard + 1


@event.listens_for(Heard, "after_update")
def _tell_branch(_mapper: object, connection: Any, target: Heard) -> None:
    connection.execute(text("UPDATE branch SET value = (value + 1) % 97 WHERE id = :id"), {"id": target.id})


@dataclass(frozen=True)
class Point:
    x: int
    y: int


class Placed(Base):
    """Two columns as one value, and an attribute that is worked out, and can be set."""

    __tablename__ = "placed"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    x: Mapped[int] = mapped_column(default=0)
    y: Mapped[int] = mapped_column(default=0)
    point: Mapped[Point] = composite("x", "y")

    @hybrid_property
    def doubled(self) -> int:
        return self.value * 2

    @doubled.inplace.setter
    def _set_doubled(self, doubled: int) -> None:
        self.value = doubled // 2

    @doubled.inplace.update_expression
    @classmethod
    def _update_doubled(cls, doubled: Any) -> Any:
        return [(cls.value, doubled / 2)]


class Parted(Base):
    """In partitions by its key."""

    __tablename__ = "parted"
    __table_args__ = {"postgresql_partition_by": "RANGE (id)"}  # noqa: RUF012  # SQLAlchemy's way
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Loud(TypeDecorator[str]):
    """Texts that the process turns into capitals when it reads them."""

    impl, cache_ok = String, True

    def process_result_value(self, value: str | None, _dialect: object) -> str | None:
        return None if value is None else value.upper()


class Guarded(Base):
    """With row security, which the lanes' role is above, and a type of the user's."""

    __tablename__ = "guarded"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
    word: Mapped[str | None] = mapped_column(Loud, server_default="seed")


class Alike(MappedAsDataclass, Base, kw_only=True):
    """Objects that are equal by their values, and have no hash."""

    __tablename__ = "alike"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Note(Base):
    """New rows, numbered by the server: their order shows in which order they were written."""

    __tablename__ = "note"
    number: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    text: Mapped[str] = mapped_column(String(40))


CLASSES: dict[str, type[Any]] = {
    each.__name__: each
    for each in (
        Account, Branch, Pair, SameAccount, AccountView, Till, Stamped, Ruled, Versioned, Figured, Summed, Touched,
        Purse, Parent, Child, Leaf, Ticket, Dog, Cat, Heard, Placed, Parted, Guarded, Alike,
    )
}  # fmt: skip
# What a shared batch may delay, and what it should not be misled by.
PLAIN = ("Account", "Branch", "Pair", "Cat")
# Where `value` is: the class and the table that a statement names.
VALUE_CLASS: dict[str, type[Any]] = {**CLASSES, "Dog": Animal, "Cat": Animal}
# Other columns, and what they are set to; one value or another breaks a rule.
EXTRAS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Account": {
        "label": ("one", None, "two"),
        "price": (Decimal("1.25"), Decimal(3), None),
        "code": ("ab", "abcd", None),
    },
    "SameAccount": {"label": ("three", None)},
    "Till": {"branch_id": (2, 3, 1)},
    "Stamped": {"untold": (5, 6)},
    "Figured": {"extra": (1, 2), "memo": ("memo", None)},
    "Touched": {"changes": (20, 30)},
    "Purse": {"place": (11, 1, 2), "label": ("p1", "p2", "free"), "branch_id": (1, 2, 9)},
    "Child": {"parent_id": (1, 2, 3)},
    "Leaf": {"account_id": (1, 2, 3)},
    "Ticket": {"account_id": (1, 2, None)},
    "Dog": {"tricks": (1, 2)},
    "Cat": {"lives": (7, 8)},
    "Heard": {"heard": (10, 20)},
    "Placed": {"x": (1, 2), "y": (3, 4)},
}
