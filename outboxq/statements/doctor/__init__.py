"""The statements of `outboxq doctor`."""
