"""The business tables of the benchmarks: accounts, whose balances the jobs change."""

from sqlalchemy import BigInteger, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The application's tables."""


class Account(Base):
    """One account."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    owner: Mapped[str]
    balance: Mapped[int] = mapped_column(BigInteger, default=0)


account = Base.metadata.tables["account"]
assert isinstance(account, Table)
