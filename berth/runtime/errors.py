"""The failures that decide a process's exit code (docs/architecture.md, "Exit codes")."""

EXIT_CRASH = 1
EXIT_BAD_CONFIG = 2
EXIT_CANNOT_START = 3


class ConfigError(Exception):
    """A flag or environment variable is wrong. One line that names the flag; exit 2."""


class Failed(Exception):
    """The process did its work and the outcome is failure: a model that does not load. Said in one
    message, without a traceback; exit 1."""


class CannotStart(Exception):
    """The configuration is right but the process cannot begin (port in use, API server away); exit 3."""
