"""The command line: `python -m shop stock teapot 3900 5`."""

import argparse

from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from .models import Product
from .settings import read_settings


def main() -> None:
    """Put a product on the shelves, with its price."""
    parser = argparse.ArgumentParser(prog="python -m shop", description="The shop's shelves.")
    commands = parser.add_subparsers(dest="command", required=True)
    stocking = commands.add_parser("stock", help="have so many of a product, at a price")
    stocking.add_argument("sku")
    stocking.add_argument("price_cents", type=int)
    stocking.add_argument("number", type=int)
    given = parser.parse_args()
    # A command is sync, whatever the server's driver is.
    url = make_url(read_settings().database_url).set(drivername="postgresql+psycopg")
    with Session(create_engine(url)) as session, session.begin():
        session.merge(Product(sku=given.sku, price_cents=given.price_cents, stock=given.number))


if __name__ == "__main__":
    main()
