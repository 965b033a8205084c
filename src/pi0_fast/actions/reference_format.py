"""The byte-level symbol format of published FAST tokenizers: coefficients -> byte symbols with barriers, and back.

A coefficient c is the Unicode character with code point ``c - min_token``. A chunk's characters form one string, which
GPT-2's pre-tokenisation pattern cuts into words; the UTF-8 bytes of each word are merged by BPE, words apart. Here the
bytes of a row become base ids for bpe.py, with a -1 between words. Written from the description of the format
(https://huggingface.co/docs/tokenizers, ByteLevel), on integers; tests compare it with `tokenizers` itself.

The pattern, for the code points 39 115 32 97 98 55 (``'s ab7``): the contraction 's, then " ab" (a space joins the
letters after it), then "7".
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import inlined, kernel

IntArray = npt.NDArray[np.int32]

_OTHER, _LETTER, _NUMBER, _WHITE, _SPACE = 0, 1, 2, 3, 4
_APOSTROPHE = 39
# White_Space in Unicode, without the plain space: the pattern treats that one apart.
_WHITE_SPACE = (*range(9, 14), 133, 160, 5760, *range(8192, 8203), 8232, 8233, 8239, 8287, 12288)
# Letters of Unicode 14 to 16, half-open ranges: `tokenizers` 0.22 knows them, Python 3.10 to 3.13 do not know all.
_LATER_LETTERS = (
    (0x870, 0x888), (0x889, 0x88F), (0x8B5, 0x8B6), (0x8C8, 0x8CA), (0xC5D, 0xC5E), (0xCDD, 0xCDE), (0x170D, 0x170E),
    (0x171F, 0x1720), (0x1B4C, 0x1B4D), (0x1C89, 0x1C8B), (0x2C2F, 0x2C30), (0x2C5F, 0x2C60), (0x9FFD, 0xA000),
    (0xA7C0, 0xA7C2), (0xA7CB, 0xA7CE), (0xA7D0, 0xA7D2), (0xA7D3, 0xA7D4), (0xA7D5, 0xA7DD), (0xA7F2, 0xA7F5),
)  # fmt: skip
#: Code points from here on are surrogates, which are no characters.
FIRST_SURROGATE = 0xD800


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte 0 .. 255: itself where that is printable, else 256 and up in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [""] * 256
    extra = 256
    for byte in range(256):
        if byte in printable:
            characters[byte] = chr(byte)
        else:
            characters[byte] = chr(extra)
            extra += 1
    return characters


@lru_cache(maxsize=1)
def character_classes() -> npt.NDArray[np.int8]:
    """How the pattern sees each code point below the surrogates: other, letter, number, white space, plain space."""
    classes = np.zeros(FIRST_SURROGATE, np.int8)
    for code in range(FIRST_SURROGATE):
        category = unicodedata.category(chr(code))
        if category[0] == "L":
            classes[code] = _LETTER
        elif category[0] == "N":
            classes[code] = _NUMBER
    for first, end in _LATER_LETTERS:  # so that ids do not depend on the version of Python
        classes[first:end] = _LETTER
    classes[list(_WHITE_SPACE)] = _WHITE
    classes[32] = _SPACE
    classes.flags.writeable = False
    return classes


@inlined
def _contraction(codes, i, size):  # type: ignore[no-untyped-def]
    """Length of 's 't 'm 'd 're 've 'll at i, else 0."""
    found = 0
    if codes[i] == _APOSTROPHE and i + 1 < size:
        one = codes[i + 1]
        if one == 115 or one == 116 or one == 109 or one == 100:
            found = 2
        elif i + 2 < size:
            two = codes[i + 2]
            if ((one == 114 or one == 118) and two == 101) or (one == 108 and two == 108):
                found = 3
    return found


@inlined
def _word_end(codes, classes, i, size):  # type: ignore[no-untyped-def]
    """Where the word that begins at i ends."""
    end = i + _contraction(codes, i, size)
    if end == i:
        kind = classes[codes[i]]
        body = i
        if kind == _SPACE and i + 1 < size and classes[codes[i + 1]] < _WHITE:
            body = i + 1  # one plain space belongs to the letters, numbers or signs after it
            kind = classes[codes[body]]
        end = body + 1
        if kind >= _WHITE:
            while end < size and classes[codes[end]] >= _WHITE:
                end += 1
            if end < size and end - i > 1:
                end -= 1  # the last white space stands before a word, and is left for it
        else:
            while end < size and classes[codes[end]] == kind:
                end += 1
    return end


@kernel
def _to_bytes(rows, min_token, classes, byte_ids, out, lengths):  # type: ignore[no-untyped-def]
    size = rows.shape[1]
    codes = np.empty(size, np.int32)
    for n in range(len(rows)):
        for i in range(size):
            codes[i] = rows[n, i] - min_token
        written, i = 0, 0
        while i < size:
            end = _word_end(codes, classes, i, size)
            if i > 0:
                out[n, written] = -1
                written += 1
            for j in range(i, end):
                code = codes[j]
                if code < 0x80:
                    out[n, written] = byte_ids[code]
                    written += 1
                elif code < 0x800:
                    out[n, written] = byte_ids[0xC0 | (code >> 6)]
                    out[n, written + 1] = byte_ids[0x80 | (code & 0x3F)]
                    written += 2
                else:
                    out[n, written] = byte_ids[0xE0 | (code >> 12)]
                    out[n, written + 1] = byte_ids[0x80 | ((code >> 6) & 0x3F)]
                    out[n, written + 2] = byte_ids[0x80 | (code & 0x3F)]
                    written += 3
            i = end
        lengths[n] = written


def to_byte_rows(rows: IntArray, min_token: int, byte_ids: IntArray) -> tuple[IntArray, IntArray]:
    """Coefficients as base ids of their bytes, with -1 between the words of the pre-tokenisation; one thread.

    Args:
        rows: int32 [N, L] coefficients, each at least `min_token` and below ``min_token + FIRST_SURROGATE``.
        min_token: the coefficient of code point 0.
        byte_ids: int32 [256], the base id of each byte.

    Returns:
        Base ids int32 [N, 4 L], of which the first `lengths` int32 [N] of each row count.
    """
    out = np.empty((len(rows), 4 * rows.shape[1]), np.int32)
    lengths = np.empty(len(rows), np.int32)
    _to_bytes(rows, min_token, character_classes(), byte_ids, out, lengths)
    return out, lengths


@kernel
def _from_bytes(rows, lengths, min_token, out, totals, broken):  # type: ignore[no-untyped-def]
    limit = out.shape[1]
    for n in range(len(rows)):
        total, i = 0, 0
        broken[n] = -1
        while i < lengths[n]:
            first = rows[n, i]
            if first < 0x80:
                size, code = 1, first
            elif 0xC2 <= first < 0xE0:
                size, code = 2, first & 0x1F
            elif 0xE0 <= first < 0xF0:
                size, code = 3, first & 0x0F
            elif 0xF0 <= first < 0xF5:
                size, code = 4, first & 0x07
            else:
                size, code = 0, 0
            good = size > 0 and i + size <= lengths[n]
            if good:
                for j in range(1, size):
                    following = rows[n, i + j]
                    good = good and 0x80 <= following < 0xC0
                    code = (code << 6) | (following & 0x3F)
            if good and size == 3:
                good = code >= 0x800 and not (0xD800 <= code < 0xE000)
            if good and size == 4:
                good = 0x10000 <= code < 0x110000
            if not good:
                broken[n] = total
                break
            if total < limit:
                out[n, total] = code + min_token
            total += 1
            i += size
        totals[n] = total
        for k in range(total, limit):
            out[n, k] = 0


def from_byte_rows(
    rows: IntArray, lengths: npt.NDArray[np.int64], min_token: int, limit: int
) -> tuple[IntArray, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bytes back to coefficients; one thread.

    Args:
        rows: int32 [N, M] bytes, of which `lengths` int64 [N] count.
        min_token: the coefficient of code point 0.
        limit: how many coefficients of each row to keep.

    Returns:
        Coefficients int32 [N, limit] (0 beyond a row's end); how many each row has, int64 [N]; and the index of the
        first coefficient whose bytes are no UTF-8, where the row stops, int64 [N] (-1: none).
    """
    out = np.empty((len(rows), limit), np.int32)
    totals, broken = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    _from_bytes(rows, lengths, min_token, out, totals, broken)
    return out, totals, broken
