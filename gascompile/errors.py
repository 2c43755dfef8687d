"""The typed errors that users catch; ``core.errors`` says what each means."""

from gascompile.core.errors import *  # noqa: F403 - the public name of all of them
