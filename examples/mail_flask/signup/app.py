"""The HTTP side: `flask --app signup.app run`."""

from flask import Blueprint, Flask, Response, abort, jsonify, make_response, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.exc import IntegrityError

from outboxq import add_job

from .jobs import send_welcome
from .models import Base, User
from .settings import read_settings

db = SQLAlchemy(model_class=Base)
routes = Blueprint("signup", __name__)


@routes.post("/users")
def sign_up() -> Response:
    """Write the user and the job that welcomes them in one transaction, and answer. No mail is sent here."""
    given = request.get_json()
    name, email = read_text(given, "name"), read_text(given, "email")
    user = User(name=name, email=email)
    db.session.add(user)
    try:
        # For its number.
        db.session.flush()
        # Flask-SQLAlchemy's session is not outboxq's: the function does the same for every session.
        add_job(db.session, send_welcome, user_id=user.id, name=name, email=email)
        db.session.commit()
    except IntegrityError:
        db.session.rollback()
        abort(make_response({"error": f"{email} has signed up before"}, 409))
    return make_response(describe(user), 201)


@routes.get("/users/<int:user_id>")
def show_user(user_id: int) -> Response:
    """Show a user, and whether the mail was sent."""
    user = db.session.get(User, user_id)
    if user is None:
        abort(make_response({"error": f"there is no user {user_id}"}, 404))
    return jsonify(describe(user))


def describe(user: User) -> dict[str, object]:
    """The user as the API shows it."""
    return {"id": user.id, "name": user.name, "is_welcomed": user.is_welcomed}


def read_text(given: object, name: str) -> str:
    """A text of the request's body."""
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, str) or not value.strip():
        abort(make_response({"error": f"{name!r} is to be a text"}, 422))
    return value.strip()


def create_app(database_url: str | None = None) -> Flask:
    """The application on a database, by default the one that the settings name."""
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url or read_settings().database_url
    app.json.sort_keys = False  # type: ignore[attr-defined]  # as the default provider has it
    db.init_app(app)
    app.register_blueprint(routes)
    return app
