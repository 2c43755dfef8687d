"""Machinery: what runs a program and is no part of it, however the program comes to hold it."""

from __future__ import annotations


class Machinery:
    """Base of such classes: what is in one is compared with nothing, so that nobody needs to look through all of it.

    A loss may be a method of an object that keeps its own step, or its optimizer, whose methods the step has replaced.
    """

    __slots__ = ()
