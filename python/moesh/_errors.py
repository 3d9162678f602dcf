"""moesh.Error, from Python."""

from . import _moesh


def error(kind, text):
    made = _moesh.Error(text)
    made.kind = kind
    return made
