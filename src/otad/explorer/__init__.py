"""The explorer: a page that shows why a model answers as it does, and how an attack changes it."""
