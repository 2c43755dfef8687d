"""What ranks tell each other where one fails, and what is said of it and of an exchange that broke."""

from __future__ import annotations

from gascompile.core.errors import RankError

_OWN, _OTHERS = "own", "others"


def told(error: BaseException) -> str:
    """Return what a rank tells the others of its error, or of what it has found to be wrong with them."""
    if isinstance(error, RankError):
        return f"{_OTHERS} {error.rank} {error}"
    return f"{_OWN} {type(error).__name__}: {error}"


def is_of_others(said: str) -> bool:
    """Return whether a rank told of other ranks."""
    return said.startswith(_OTHERS)


def heard(rank: int, said: str) -> RankError:
    """Return the error of who hears what rank ``rank`` told."""
    _, _, reason = said.partition(" ")
    if is_of_others(said):
        which, _, reason = reason.partition(" ")
        return RankError(f"rank {rank} has found: {reason}", rank=int(which))
    return RankError(
        f"rank {rank} has failed: {reason}. All ranks have stopped, and values may be half updated; mend the cause and "
        "start the job again from its last checkpoint",
        rank=rank,
    )


def first_line(error: BaseException) -> str:
    """Return what broke, without the advice of torch that follows."""
    return str(error).split("\n")[0].split(". This is typically")[0]
