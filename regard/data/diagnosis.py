"""What a file is that is no UTF-8 text, judged by how it begins, and what to do about it.

foreign(start)              what is certainly something else: a picture, an archive, UTF-16
encoding(start)             which encoding text seems to have that is not UTF-8
endings(start)              whether its lines end in several ways
separated(start, least)     by which separator it has some
"""

import codecs
import re
import unicodedata
from collections import Counter
from typing import Literal, TypeAlias

Separator: TypeAlias = Literal["tab", "comma", "semicolon", "pipe"]

SEPARATORS: dict[Separator, str] = {"tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}

_FORMATS = (
    (0, b"\x89PNG\r\n", "a PNG image; name a text file"),
    (0, b"\xff\xd8\xff", "a JPEG image; name a text file"),
    (0, b"%PDF-", "a PDF document; extract its text first (pdftotext)"),
    (0, b"PK\x03\x04", "a zip archive, as .xlsx, .docx and .npz are; save its text by itself"),
    (0, b"PK\x05\x06", "an empty zip archive; name a text file"),
    (257, b"ustar", "a tar archive; unpack it first"),
    (0, b"\x93NUMPY", "a numpy array; name a text file"),
    (0, b"\xd0\xcf\x11\xe0", "an old Office document; save it as text"),
    (0, b"\x1f\x8b", "compressed twice; unpack it once"),
)
_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_CONTROL = bytes({*range(32), 127} - {*b"\t\n\v\f\r\x1b"})
_BINARY = 16  # one control character among so many bytes, or more: no text has them
_SAMPLE = 2**14  # bytes by which an encoding is judged
_ICONV = {
    "cp932": "SHIFT_JIS",
    "mac_roman": "MACINTOSH",
    "mac_iceland": "MACINTOSH",
    "kz1048": "RK1048",
    "euc_jis_2004": "EUC-JISX0213",
}
_USUAL = 0.9  # a share of lines, or of characters, that speaks for all


def foreign(start: bytes) -> str | None:
    """What a file with this beginning is, and the remedy; None where it may be UTF-8 text."""
    for place, magic, what in _FORMATS:
        if start.startswith(magic, place):
            return f"is {what}"
    for mark, name in _MARKS:
        if start.startswith(mark):
            return f"is {name}; {_convert(name)}"
    if _BINARY * (len(start) - len(start.translate(None, _CONTROL))) < len(start) or not start:
        return None
    if wide := _wide(start):
        return f"seems to be {wide}, without a byte order mark; {_convert(wide)}"
    return "holds binary data, not text; name a text file"


def encoding(start: bytes) -> str | None:
    """Which encoding these lines seem to have, and the remedy; None where they are UTF-8, or some
    of them are, so that the others are damaged."""
    lines = [line for line in _whole(start).split(b"\n") if not line.isascii()]
    if not lines or any(_decodes(line, "utf-8") for line in lines):
        return None
    from charset_normalizer import from_bytes

    matches = from_bytes(b"\n".join(lines)[:_SAMPLE])
    # By itself it takes French for Latin-6 and short Latin-1 for a Macintosh's encoding.
    names = {name for match in matches for name in match.could_be_from_charset}
    if "cp1252" in names and _western(b"".join(lines)):
        return f"seems to be Latin-1 (Windows-1252); {_convert('WINDOWS-1252')}"
    best = matches.best()
    if best is None:
        return f"is not UTF-8; find out its encoding, and {_convert('ENCODING')}"
    name = _iconv(best.encoding)
    return f"is not UTF-8 and seems to be {name}; {_convert(name)}"


def endings(start: bytes) -> str | None:
    """What to do about lines that end otherwise than others."""
    if re.search(rb"\r[^\n]", start):
        return "has lines that end with CR, others with LF; end all of them with LF"
    return None


def separated(start: bytes, least: int) -> tuple[Separator, int] | None:
    """By what nearly all of these lines have the same number of columns, `least` or more."""
    for separator in SEPARATORS:
        counts = _counted(start, separator)
        number, lines = counts.most_common(1)[0]
        if number >= least and lines >= _USUAL * counts.total():
            return separator, number
    return None


def _counted(start: bytes, separator: Separator) -> Counter[int]:
    """How many lines have how many columns."""
    lines = [line for line in _whole(start).split(b"\n") if line.strip()] or [b""]
    sign = SEPARATORS[separator].encode()
    if separator != "tab":  # in CSV, what stands in quotes is a part of its column
        lines = [b"".join(line.split(b'"')[::2]) for line in lines]
    return Counter(line.count(sign) + 1 for line in lines)


def _whole(start: bytes) -> bytes:
    """Without the last line, which may be cut off."""
    return start[: start.rfind(b"\n") + 1] or start


def _wide(start: bytes) -> str | None:
    """UTF-16 or UTF-32, in which this is text with spaces or ends of lines."""
    for name in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        try:
            text = codecs.getincrementaldecoder(name)().decode(start)
        except UnicodeDecodeError:
            continue
        readable = sum(sign.isprintable() or sign.isspace() for sign in text)
        if not {" ", "\n"}.isdisjoint(text) and readable >= _USUAL * len(text):
            return name
    return None


def _western(lines: bytes) -> bool:
    """A few letters with accents among many without, as Western European languages have them."""
    signs = bytes(byte for byte in lines if byte >= 0x80).decode("cp1252", "replace")
    known = sum(unicodedata.category(sign)[0] in "LPZ" for sign in signs)  # “ and – among them
    letters = sum(chr(byte).isalpha() for byte in lines if byte < 0x80)
    return known >= _USUAL * len(signs) and 2 * len(signs) <= letters


def _decodes(line: bytes, name: str) -> bool:
    try:
        line.decode(name)
    except UnicodeDecodeError:
        return False
    return True


def _iconv(name: str) -> str:
    """Python's name of an encoding as iconv knows it."""
    return _ICONV.get(name, name.upper().replace("_", "-"))


def _convert(name: str) -> str:
    return f"convert it: iconv -f {name} -t UTF-8 OLD > NEW"
