"""Users."""

from sqlalchemy import BigInteger, Identity, false
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The application's tables. They know nothing of Flask, so that a relay need not either."""


class User(Base):
    """A user who has signed up, and whether the mail of welcome was sent."""

    __tablename__ = "user"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str]
    email: Mapped[str] = mapped_column(unique=True)
    is_welcomed: Mapped[bool] = mapped_column(server_default=false())
