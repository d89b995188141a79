"""A shop on FastAPI that confirms orders behind the response."""
