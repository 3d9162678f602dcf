"""A configuration as Python has it (dict, dataclass, keyword arguments), as options by name."""

import dataclasses
import numbers
import os

from ._errors import error

_LARGEST = 2**63


def _refuse(name, value, why):
    raise error("config", f"{name} is {value!r} (Python){why}")


def _scalar(name, value):
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral):
        if not -_LARGEST <= value < _LARGEST:
            _refuse(name, value, "; a whole number takes 64 bits")
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)  # of numpy, or of a tensor with one element
    if callable(item) and getattr(value, "ndim", None) == 0:
        return _scalar(name, item())
    _refuse(name, value, f", of type {type(value).__name__}; an option takes a bool, an int, a "
            "float or a str, and a section is a dict or a dataclass")


def _fields(value):
    """The entries of a section, or None where it is a value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        return list(value.items())
    return None


def _flatten(prefix, entries, values):
    for key, value in entries:
        if not isinstance(key, str):
            _refuse(prefix or "a key of the configuration", key,
                    ", not a str; keys are names of options")
        name = f"{prefix}.{key}" if prefix else key
        inner = _fields(value)
        if value is None:  # a field of a dataclass that is not set
            continue
        if name == "mesh" and inner is not None:
            values.append((name, ",".join(f"{axis}={size}" for axis, size in inner)))
        elif inner is not None:
            _flatten(name, inner, values)
        elif isinstance(value, (list, tuple)):
            for number, entry in enumerate(value):
                fields = _fields(entry)
                if fields is None:
                    _refuse(f"{name}.{number}", entry,
                            "; an entry of a list is a dict or a dataclass")
                _flatten(f"{name}.{number}", fields, values)
        else:
            values.append((name, _scalar(name, value)))


def values_of(config, options):
    """[("training.steps", 3), ...]: `options` are keyword arguments, which override `config`."""
    values = []
    if isinstance(config, (str, os.PathLike)):
        config = {"config": config}
    entries = _fields(config) if config is not None else []
    if entries is None:
        _refuse("the configuration", config, f", of type {type(config).__name__}; it takes a dict, "
                "a dataclass or the path of a TOML file")
    _flatten("", entries, values)
    _flatten("", options.items(), values)
    return values
