"""A shop that charges each order once at a payment provider."""
