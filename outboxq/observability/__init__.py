"""Events as logs."""
