"""Random changes of files that know their structure: of JSON trees, of safetensors and .npy headers, and of bytes."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

#: JSON that takes the place of a value: other types, numbers out of every range, names of other files, text that is no
#: Unicode, deep and long values.
VALUES = (
    "null", "true", "false", "0", "1", "-1", "2", "7", "32", "128", "0.5", "-0.0", "1e-320", "1e308", "1e999", "NaN",
    "Infinity", "-Infinity", "255", "65536", str(2**31), str(2**32 + 1), str(10**9), str(2**63), str(2**64 - 1),
    str(-(2**63)), "1" + "0" * 400, "1" * 5000, '""', '"x"', '"silu"', '"BF16"', '"float32"', '"../x"',
    '"/etc/passwd"', '"a/../../b"', '"model.safetensors"', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"%s{}"',
    '"\u00e9\U0001f600"', '"' + "y" * 100_000 + '"', "[]", "[[]]", "[0, 0]", "[-1, 1]", "[null]", '["a"]', "[1e400]",
    "[0, 18446744073709551615]", "{}", '{"a": 1}', '{"": {"": []}}', "[" * 60 + "]" * 60, "[" * 500 + "]" * 500,
    '{"a":' * 900 + "1" + "}" * 900, "[" * 100_000, "[" + "0," * 30_000 + "0]", "tru", "'x'", "1_000", "0x10", "",
)  # fmt: skip


class Raw(NamedTuple):
    """JSON text that stands for itself."""

    text: str


class Pairs(list):
    """An object as `[name, value]` lists, so that a name may come twice."""


def parsed(text: str) -> Any:
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))


def dumped(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{dumped(value)}" for name, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(dumped, tree)) + "]"
    return json.dumps(tree)


def _places(node: Any) -> Any:
    """(list, index) of every value below a node."""
    for index, value in enumerate(node):
        if isinstance(node, Pairs):
            yield value, 1
            inside = value[1]
        else:
            yield node, index
            inside = value
        if isinstance(inside, list):
            yield from _places(inside)


def changed_json(text: str, draw: random.Random) -> str:
    """A JSON document with one to three of its values, names and containers changed."""
    root = [parsed(text)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(root))
        holder, index = draw.choice(places)
        value, kind = holder[index], draw.randrange(8)
        if kind == 0 and type(value) is int:
            holder[index] = draw.choice((value + 1, value - 1, value * 2, -value, value + 2**32, value + 2**64))
        elif kind == 1 and isinstance(value, str):
            other, place = draw.choice(places)
            holder[index] = draw.choice((value[1:], value + "x", value.upper(), value * 3, Raw(dumped(other[place]))))
        elif kind == 2 and isinstance(value, list) and value:
            del value[draw.randrange(len(value))]
        elif kind == 3 and isinstance(value, list) and value:
            again = draw.choice(value)
            copied = [again[0], Raw(dumped(again[1]))] if isinstance(value, Pairs) else Raw(dumped(again))
            value.insert(draw.randrange(len(value)), copied)
        elif kind == 4 and isinstance(value, Pairs) and value:
            # A name twice, with another value; a name that another entry has; a strange name.
            first, second = draw.choice(value), draw.choice(value)
            name = draw.choice((first[0], first[0], "\ud800", "", "__metadata__", "../x"))
            value.append([name, Raw(draw.choice((dumped(second[1]), draw.choice(VALUES))))])
        elif kind == 5:
            other, place = draw.choice(places)
            holder[index] = Raw(dumped(other[place]))
        elif kind == 6:
            holder[index] = Raw(draw.choice(("[%s]", '{"a": %s}', '"%s', "%s,", "%s %s")).replace("%s", dumped(value)))
        else:
            holder[index] = Raw(draw.choice(VALUES))
    return dumped(root[0])


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bits flipped, bytes changed, left out, doubled or moved, an end cut off, a file that something stands before."""
    kind = draw.randrange(8)
    if kind == 0:
        return content[: draw.randrange(len(content) + 1)]
    if kind == 1:
        return draw.choice((b"\xef\xbb\xbf", b"\0", b"PK\x03\x04", b"\xff\xfe", b"[" * 1000, b"\n" * 9)) + content
    if kind == 2:
        return content + draw.choice((b"\0", b"x" * 1000, content))
    found = bytearray(content)
    for _ in range(draw.randrange(1, 5)):
        # Most structure is at the beginning.
        place = draw.randrange(max(1, min(len(found), draw.choice((16, 400, len(found))))))
        if kind == 3 and found:
            found[place] ^= 1 << draw.randrange(8)
        elif kind == 4:
            found[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 5:
            del found[place : place + draw.choice((1, 8, 300))]
        elif kind == 6:
            found[place:place] = found[place : place + draw.choice((1, 8, 300))]
        else:
            end = draw.randrange(len(found) + 1)
            found[place:end] = found[place:end][::-1]
    return bytes(found)


def _changed_text(text: str, draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return changed_bytes(text.encode(), draw)
    return changed_json(text, draw).encode(errors=draw.choice(("surrogatepass", "replace")))


def changed_document(content: bytes, draw: random.Random) -> bytes:
    """A JSON file."""
    return _changed_text(content.decode(), draw)


def changed_tensors(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file: its header as JSON, the header's length, or any bytes."""
    kind, length = draw.randrange(6), int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if kind == 0:
        return changed_bytes(content, draw)
    if kind == 1:
        sizes = (0, 1, 7, length - 1, length + 1, len(content), 10**8, 2**31, 2**40, 2**63, 2**64 - 1, 2**64 - 8)
        return (draw.choice(sizes) % 2**64).to_bytes(8, "little") + content[8:]
    if kind == 2:
        data = draw.choice((data[:-1], data + b"\0", b"", data * 2))
    else:
        header = _changed_text(header.decode(), draw)
    return len(header).to_bytes(8, "little") + header + data


def changed_array(content: bytes, draw: random.Random) -> bytes:
    """A .npy file: words of its header, or any bytes."""
    if draw.random() < 0.4:
        return changed_bytes(content, draw)
    length = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + length].decode("latin1")
    words = ("'<f4'", "'fortran_order'", "False", "True", "(", ")", ",", "{", "}", "'shape'", "'descr'", ":", "5", "4")
    others = (*words, "'|O'", "'V2'", "'>f8'", "-1", "10**9", "9" * 4000, "((", "[" * 3000, "None", "'\\x00'", "1L",
              "1if", "[('a', '<f4')]", "1j", "{}", "lambda: 0", "('<f4', (10**9,))")  # fmt: skip
    for _ in range(draw.randrange(1, 4)):
        header = header.replace(draw.choice(words), draw.choice(others), draw.choice((1, -1)))
    text = header.encode("latin1", errors="replace")
    version, width = draw.choice(((b"\1\0", 2), (b"\1\0", 2), (b"\2\0", 4), (b"\3\0", 4), (b"\7\1", 2)))
    size = len(text) if draw.random() < 0.9 else draw.choice((0, 1, 60_000))
    size = size % 2 ** (8 * width)
    return content[:6] + version + size.to_bytes(width, "little") + text + content[10 + length :]
