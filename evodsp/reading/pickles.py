"""What a pickle would build, found out before any unpickler sees it.

Unpickling calls what the file names, but harm needs no call: a tuple as a key is hashed, and one that is nested 100,000 deep
ends the process, one that shares its parts 60 levels down never ends. So `check_pickle` follows the instructions on stand-ins
that hold nothing but their parts, and refuses what no program of ours or of others stores: other instructions, other keys,
deep nesting, objects that are large once they are written out, and calls that only ask for memory.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from evodsp.reading.quoting import quoted

_LONGEST_KEY = 1000
"""Letters. Names of parameters have 100."""
_MOST_IN_KEY = 8
"""Parts of a tuple that is a key."""
_KEY_BITS = 63
"""Of a whole number that is a key. Larger ones can be chosen so that all have one hash."""
_DEEPEST = 200
_MOST = 1 << 21
"""Instructions, and parts of an object when it is written out. A checkpoint of AlphaFold2 in training has a million."""


class PickleRefused(ValueError):
    """A pickle that would harm whoever reads it, and why."""


class _Made:
    """Stands in for an object: its kind, its parts, and in the end how deep it is nested and how many parts it has in all."""

    __slots__ = ("depth", "kind", "name", "parts", "size")

    def __init__(self, kind: str, parts: Sequence[_Made] = (), name: str = "") -> None:
        self.kind, self.parts, self.name = kind, parts, name
        self.depth = _UNKNOWN if parts or isinstance(parts, list) else 0
        self.size = 1


_UNKNOWN, _UNDER_WAY = -1, -2
_PLAIN, _INT, _LONG_INT, _LONG_TEXT = _Made("plain"), _Made("int"), _Made("long number"), _Made("long text")
_CONSTANTS = dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"), _PLAIN)
_INTS = frozenset(("BININT", "BININT1", "BININT2", "LONG1"))
_TEXTS = frozenset(("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"))
_SHORT_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_EMPTY = {"EMPTY_LIST": "list", "EMPTY_DICT": "dictionary", "EMPTY_SET": "set"}
_OPERANDS = {
    "APPEND": 1,
    "BUILD": 1,
    "BINPERSID": 1,
    "SETITEM": 2,
    "REDUCE": 2,
    "NEWOBJ": 2,
    "STACK_GLOBAL": 2,
    **_SHORT_TUPLES,
}
_TO_MARK = frozenset(("TUPLE", "APPENDS", "SETITEMS"))


def check_pickle(data: bytes, opcodes: Collection[str]) -> None:
    """Raise PickleRefused, with the reason, unless unpickling `data` builds a modest object by some of `opcodes`.
    Raise ValueError if `data` is damaged.

    Nothing is built, imported or called. What remains to the unpickler is to refuse the names that it does not know.
    """
    try:
        made = _followed(data, opcodes)
    except PickleRefused:
        raise
    except Exception as error:  # of instructions that do not fit together
        raise ValueError(f"it is damaged: {quoted(error)}") from error
    _check_sizes(made)


def _followed(data: bytes, opcodes: Collection[str]) -> list[_Made]:
    """All objects with parts that the instructions build."""
    stack: list[_Made] = []
    marks: list[int] = []
    memo: dict[int, _Made] = {}
    made: list[_Made] = []
    # A million turns are common, so the most frequent instructions come first, and nothing is called that need not be.
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name: str = opcode.name
        number: Any = argument
        if name not in opcodes:
            raise PickleRefused(f"it uses the pickle instruction {name}")
        if count >= _MOST:
            raise PickleRefused(f"it has more than {_MOST} pickle instructions")
        if name in ("BINPUT", "LONG_BINPUT"):
            # The unpickler makes room for as many remembered objects as the largest number of one.
            if number > count:
                raise PickleRefused("it numbers an object that it does not have")
            memo[number] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[number])
        elif name in _INTS:
            stack.append(_INT if abs(number).bit_length() <= _KEY_BITS else _LONG_INT)
        elif name in _TEXTS:
            stack.append(_PLAIN if len(number) <= _LONGEST_KEY else _LONG_TEXT)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "GLOBAL":
            stack.append(_Made("class", (), str(argument).replace(" ", ".")))
        elif name in _EMPTY:
            made.append(_Made(_EMPTY[name], []))
            stack.append(made[-1])
        elif name in _OPERANDS or name in _TO_MARK:
            start = marks.pop() if name in _TO_MARK else len(stack) - _OPERANDS[name]
            if start < (marks[-1] if marks else 0):
                raise IndexError("an instruction without its operands")
            parts = stack[start:]
            del stack[start:]
            if name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
                for key in parts[::2] if name in ("SETITEM", "SETITEMS") else ():
                    _check_key(key)
                whole = stack[-1].parts
                if not isinstance(whole, list):
                    raise TypeError("an object that has no parts")
                whole += parts
                continue
            if name in ("REDUCE", "NEWOBJ"):
                _check_call(parts[0].name, parts[1])
            is_object = name in ("REDUCE", "NEWOBJ", "BINPERSID")
            kind = "object" if is_object else "class" if name == "STACK_GLOBAL" else "tuple"
            made.append(_Made(kind, parts if is_object else tuple(parts)))
            stack.append(made[-1])
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise PickleRefused(f"it uses the pickle instruction {name}")
    return made


def _check_key(key: _Made) -> None:
    """Raise PickleRefused unless a key is a short text, a number, None, a class, or a short tuple of such."""
    kind = key.kind
    if kind == "tuple" and len(key.parts) <= _MOST_IN_KEY:
        kind = next((part.kind for part in key.parts if part.kind not in ("plain", "int", "class")), "plain")
        kind = kind if kind == "plain" else f"tuple with a {kind}"
    if kind not in ("plain", "int", "class"):
        raise PickleRefused(f"it has a dictionary with a {kind} as a key")


def _check_call(called: str, arguments: _Made) -> None:
    """Raise PickleRefused for a call that would reserve as much memory as the file says."""
    takes_size = called.endswith(".bytearray") or (
        called.startswith("torch.") and called.endswith(("Tensor", "Storage"))
    )
    if takes_size and any(part.kind not in ("plain", "object") for part in arguments.parts):
        raise PickleRefused(f"it calls '{called}' with a size")


def _check_sizes(made: Iterable[_Made]) -> None:
    """Raise PickleRefused if an object contains itself, is nested too deeply, or is too large when it is written out."""
    for first in made:
        waiting = [first] if first.depth == _UNKNOWN else []
        while waiting:
            one = waiting[-1]
            inner = [part for part in one.parts if part.depth]
            if one.depth == _UNKNOWN:
                one.depth = _UNDER_WAY
                if any(part.depth == _UNDER_WAY for part in inner):
                    raise PickleRefused("it has an object that contains itself")
                waiting += (new := [part for part in inner if part.depth == _UNKNOWN])
                if new:
                    continue
            waiting.pop()
            if one.depth == _UNDER_WAY:
                one.depth = 1 + max((part.depth for part in inner), default=0)
                one.size = 1 + len(one.parts) + sum(part.size for part in inner)
            if one.depth > _DEEPEST:
                raise PickleRefused(f"it is nested more than {_DEEPEST} deep")
            if one.size > _MOST:
                raise PickleRefused(f"it has an object of more than {_MOST} parts")
