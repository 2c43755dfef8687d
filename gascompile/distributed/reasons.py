"""What is said of a rank that has failed, and of an exchange that broke."""

from __future__ import annotations


def broken(rank: int, said: str) -> str:
    """Return what to say where rank ``rank`` has ``said`` why it failed."""
    return (
        f"rank {rank} has failed: {said}. All ranks have stopped, and values may be half updated; mend the cause and "
        "start the job again from its last checkpoint"
    )


def first_line(error: BaseException) -> str:
    """Return what broke, without the advice of torch that follows."""
    return str(error).split("\n")[0].split(". This is typically")[0]
