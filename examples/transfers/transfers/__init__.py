"""A bank whose transfers are carried out once, whatever is killed."""
