"""Forms under a ceiling of bytes, against every combination there is."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gascompile.formats.allocation import Choice, allocate

CHOICES = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(
        st.builds(
            Choice,
            form=st.sampled_from(["int4", "int8", "bfloat16"]),
            size_bytes=st.integers(1, 20),
            error=st.floats(0, 10),
        ),
        min_size=1,
        max_size=3,
        unique_by=(lambda choice: choice.form, lambda choice: choice.size_bytes),
    ),
    min_size=1,
)


def taken(choices: dict[str, list[Choice]], forms: dict[str, str]) -> tuple[int, float]:
    found = [next(c for c in known if c.form == forms[name]) for name, known in choices.items()]
    return sum(c.size_bytes for c in found), sum(c.error for c in found)


def test_the_largest_gain_per_byte_goes_first() -> None:
    choices = {
        "early": [Choice("int8", 10, 8.0), Choice("bfloat16", 20, 0.0)],
        "large": [Choice("int8", 40, 9.0), Choice("bfloat16", 80, 0.0)],
        "late": [Choice("int8", 10, 1.0), Choice("bfloat16", 20, 0.0)],
    }
    assert allocate(choices, 70) == {"early": "bfloat16", "large": "int8", "late": "int8"}
    assert allocate(choices, 69) == dict.fromkeys(choices, "int8")
    assert allocate(choices, 120) == dict.fromkeys(choices, "bfloat16")


def test_a_form_that_others_surround_is_passed_over() -> None:
    """Half way costs as much as the whole way and gains little."""
    choices = {"w": [Choice("int4", 5, 9.0), Choice("int8", 9, 8.9), Choice("bfloat16", 10, 0.0)]}
    assert allocate(choices, 10) == {"w": "bfloat16"}
    assert allocate(choices, 9) == {"w": "int4"}


@given(choices=CHOICES, limit_bytes=st.integers(0, 80))
def test_the_ceiling_holds_and_nothing_of_equal_bytes_is_better_by_much(
    choices: dict[str, list[Choice]], limit_bytes: int
) -> None:
    size_bytes, error = taken(choices, allocate(choices, limit_bytes))
    most_bytes = max(limit_bytes, least_bytes(choices))
    assert size_bytes <= most_bytes
    best = min(
        sum(c.error for c in combination)
        for combination in itertools.product(*choices.values())
        if sum(c.size_bytes for c in combination) <= most_bytes
    )
    # What is taken step by step is off by one step that did not fit at most.
    largest = max(c.error for known in choices.values() for c in known)
    assert error <= best + largest + 1e-9


@given(choices=CHOICES, limit_bytes=st.integers(0, 80), enough=st.floats(0, 30))
def test_no_bytes_are_spent_once_the_error_is_small_enough(
    choices: dict[str, list[Choice]], limit_bytes: int, enough: float
) -> None:
    most_bytes, least_error = taken(choices, allocate(choices, limit_bytes))
    size_bytes, error = taken(choices, allocate(choices, limit_bytes, enough=enough))
    assert size_bytes <= most_bytes
    assert error <= max(enough, least_error) + 1e-9
    if size_bytes > taken(choices, allocate(choices, 0))[0]:
        # Without the last step that was taken it was not enough.
        fewer = max(
            (allocate(choices, limit) for limit in range(size_bytes)),
            key=lambda forms: taken(choices, forms)[0],
        )
        assert taken(choices, fewer)[1] > enough - 1e-9 or size_bytes <= least_bytes(choices)


def least_bytes(choices: dict[str, list[Choice]]) -> int:
    return sum(min(c.size_bytes for c in known) for known in choices.values())


@given(choices=CHOICES)
def test_where_everything_fits_the_errors_are_the_least_there_are(
    choices: dict[str, list[Choice]],
) -> None:
    _, error = taken(choices, allocate(choices, 1000))
    assert error == sum(min(c.error for c in known) for known in choices.values())
