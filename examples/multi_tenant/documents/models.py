"""Documents and what happened to them, each of one tenant. The migration keeps the tenants' rows apart."""

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# The tenant of the transaction, which `tenancy` sets.
CURRENT_TENANT = text("current_setting('app.tenant')")


class Base(DeclarativeBase):
    """The application's tables. outboxq's are in a PostgreSQL schema of their own."""


class Document(Base):
    """A text. Its words are counted by a job."""

    __tablename__ = "document"
    __table_args__ = (CheckConstraint("tenant <> ''", name="document_has_a_tenant"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    tenant: Mapped[str] = mapped_column(String, server_default=CURRENT_TENANT, index=True)
    title: Mapped[str]
    body: Mapped[str]
    words: Mapped[int | None]


class Activity(Base):
    """Something that happened to a document."""

    __tablename__ = "activity"
    __table_args__ = (CheckConstraint("tenant <> ''", name="activity_has_a_tenant"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    tenant: Mapped[str] = mapped_column(String, server_default=CURRENT_TENANT, index=True)
    document_id: Mapped[int] = mapped_column(ForeignKey(Document.id))
    what: Mapped[str]
