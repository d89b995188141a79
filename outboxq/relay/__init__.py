"""The process that claims jobs and runs their handlers: slots, their connections, and the threads besides them."""
