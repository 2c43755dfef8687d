"""Callers: whose code asks, by the frames of a call. The model's and libraries' count; torch's own asks for itself."""

from __future__ import annotations

import gc
import types

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file

# What these frames ask for is no part of what a model computes.
_TALK = ("logging", "warnings", "linecache", "traceback", "tqdm")
_READERS = ("/torch/serialization.py", "/torch/hub.py")
"""Torch's own that open files for whoever calls them with a name."""


def caller_of(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the frame of the model or a library that asks; ``None`` for torch, imports and log messages."""
    while frame is not None:
        if collects(frame.f_code):
            return None
        path = frame.f_code.co_filename
        if path.startswith("<frozen importlib"):
            return None
        origin = origin_of_file(path)
        if origin.versioned and any(f"/{talk}" in path for talk in _TALK):
            return None
        if origin in {Origin.TORCH, Origin.OWN}:
            return None
        if origin is not Origin.PYTHON:
            return frame
        frame = frame.f_back
    return None


def collects(code: types.CodeType) -> bool:
    """Return whether a function is called by the garbage collector, which may run anywhere."""
    return any(getattr(callback, "__code__", None) is code for callback in gc.callbacks)


def opener_of(frame: types.FrameType | None) -> types.FrameType | None:
    """Return whose code has a file opened, by the frame that opens it or hands on its name."""
    while frame is not None and _opens_for_others(frame):
        frame = frame.f_back
    return caller_of(frame)


def _opens_for_others(frame: types.FrameType) -> bool:
    code, caller = frame.f_code, frame.f_back
    if code.co_name == "get_data" and code.co_filename.startswith("<frozen importlib"):
        # A package's file, which is no import where nothing else of importing is around it.
        return caller is not None and not caller.f_code.co_filename.startswith("<frozen importlib")
    return code.co_filename.endswith(_READERS)


def name_of_weights(frame: types.FrameType) -> object:
    """Return the name of the file of safetensors that ``frame`` reads, where a function of theirs reads it whole."""
    is_whole = "/safetensors/" in frame.f_code.co_filename
    return frame.f_locals.get("filename") if is_whole else None
