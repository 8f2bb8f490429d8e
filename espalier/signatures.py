"""The signatures of a package's compiled functions: those that Python calls, and the types of their arguments.

The package's `signatures.txt` lists them, one a line: `module:function`, then the type of each argument, separated by spaces.
Modules of the package itself begin with a dot there, since a wheel gives some packages another name.

    float32  none            a scalar, None
    int64[:,:]  int64[:]r    a contiguous array that may be written to; one that is read-only
    (int64,float32[:]r)      a tuple
    module:Class(int64)      a named tuple

Functions that only compiled code calls are not listed: they are compiled into their callers. Knows numba's types; knows no folder.
"""

from __future__ import annotations

import importlib
import re
from collections import deque
from pathlib import Path
from typing import Any

from numba import types

FILE = "signatures.txt"
_TOKEN = re.compile(r"[\w.:]+(?:\[[:,]+\]r?)?|[(),]")
_OWN = re.compile(r"(?<![\w.])\.(?=[\w.]+:)", re.MULTILINE)
_ARRAY = re.compile(r"(\w+)\[([:,]+)\](r?)")


def read_signatures(package: Path) -> list[tuple[str, str]]:
    """(`module:function`, types) of each line of a package's file."""
    lines = _OWN.sub(f"{package.name}.", (package / FILE).read_text()).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def function_of(name: str) -> Any:
    """The function that `module:function` names. Imports its module."""
    module, _, name_in_module = name.partition(":")
    function: Any = getattr(importlib.import_module(module), name_in_module)
    return function


def text_of(arguments: Any) -> str:
    """The text for numba's types of some arguments. Raises ValueError if a type has none."""
    return " ".join(map(_text, arguments))


def types_of(text: str) -> tuple[Any, ...]:
    """numba's types for a text of `text_of`."""
    return tuple(_type(deque(_TOKEN.findall(argument))) for argument in text.split())


def accepts(listed: str, called: str) -> bool:
    """Whether code for the listed types can be called with others: a read-only array type also accepts a writable array."""
    if listed.replace("]r", "]") != called.replace("]r", "]"):
        return False
    pairs = zip(listed.split("]"), called.split("]"), strict=True)
    return all(ours.startswith("r") or not theirs.startswith("r") for ours, theirs in pairs)


def _text(numba_type: Any) -> str:
    if type(numba_type) is types.Array and numba_type.layout == "C" and numba_type.aligned:
        return f"{_text(numba_type.dtype)}[{','.join(':' * numba_type.ndim)}]{'' if numba_type.mutable else 'r'}"
    if isinstance(numba_type, types.BaseTuple):
        named_tuple = getattr(numba_type, "instance_class", None)
        name = "" if named_tuple is None else f"{named_tuple.__module__}:{named_tuple.__qualname__}"
        return f"{name}({','.join(map(_text, numba_type))})"  # type: ignore[call-overload]  # all kinds of tuples are iterable
    if type(numba_type) in (types.Boolean, types.Integer, types.Float, types.NoneType):
        return str(numba_type)
    raise ValueError(f"{numba_type!r}: expected a scalar, None, a contiguous array or a tuple of these")


def _type(tokens: deque[str]) -> Any:
    name = tokens.popleft()
    if name == "(":
        return types.BaseTuple.from_types(_members(tokens))
    if array := _ARRAY.fullmatch(name):
        return types.Array(getattr(types, array[1]), array[2].count(":"), "C", readonly=array[3] == "r")
    if ":" in name and tokens.popleft() == "(":
        return types.BaseTuple.from_types(_members(tokens), function_of(name))
    return getattr(types, name)


def _members(tokens: deque[str]) -> tuple[Any, ...]:
    """The types up to the closing parenthesis."""
    members = []
    while tokens[0] != ")":
        members.append(_type(tokens))
        if tokens[0] == ",":
            tokens.popleft()
    tokens.popleft()
    return tuple(members)
