"""A Flask application that welcomes each new user by one e-mail."""
