"""An application that is installed, as in an image."""
