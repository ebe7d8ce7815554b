"""Sentence pairs out of gettext catalogues: reading, cleaning, splitting.

A message is made for a program: it has keys to press (`_File`), markup, placeholders, plurals,
and it may be a mere identifier. `clean_message` keeps what reads as a sentence on both sides.
"""

from __future__ import annotations

import hashlib
import html
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polib

from examples.translation.lines import clean

MIN_WORDS, MAX_WORDS = 4, 60
MAX_PLACEHOLDERS = 2
_TEST_PERMILLE, _VAL_PERMILLE = 40, 40

_PLACEHOLDER = re.compile(
    r"%\(\w+\)[-#0+.\d]*[a-zA-Z]"  # %(name)s
    r"|%[-#0+.\d]*[sdifuxgeEGcr](?![^\W\d_])"  # %s
    r"|%[1-9]\b"  # %1
    r"|\$?\{\{?[^{}]*\}?\}"  # {name}, {{ name }}, ${name}
    r"|\$[a-zA-Z_]\w*"  # $name
)
_TAG = re.compile(r"</?([a-zA-Z][\w:-]*)(?:\s[^<>]*)?/?>|<!--.*?-->", re.DOTALL)
_INLINE = frozenset(
    "a abbr b bdi cite code em i kbd mark q samp small span strong sub sup u".split()
)
_MARKS = re.compile(r"\*\*|``|`")
_AMPERSAND_KEY = re.compile(r"&(?=\w)")
_UNDERSCORE_KEY = re.compile(r"(?<!\w)_(?=\w)")
_WORD = re.compile(r"(?<!\w)[^\W\d_]+(?:['’-][^\W\d_]+)*(?!\w)")
_PARAGRAPHS = re.compile(r"\n\s*\n")
_DEFAULT = re.compile(r'Default:\s*"(.*)"', re.DOTALL)


def read_catalog(content: bytes, suffix: str) -> Iterator[tuple[str, str]]:
    """Raw (English, translation) pairs of a ``.po`` or ``.mo`` file, each plural form for itself.

    Fuzzy, obsolete and untranslated messages are left out. Where the message's key is a name and
    its English stands in a comment (`Default: "..."`, as Plone writes it), that is taken.
    """
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        catalog = polib.mofile(file.name) if suffix == ".mo" else polib.pofile(file.name)
    for entry in catalog:
        if entry.obsolete or "fuzzy" in entry.flags or not entry.msgid:
            continue
        default = _DEFAULT.search(entry.comment or "")
        forms = [(default.group(1) if default else entry.msgid, entry.msgstr)]
        if entry.msgid_plural and len(entry.msgstr_plural) == 2:
            forms = [
                (entry.msgid, entry.msgstr_plural[0]),
                (entry.msgid_plural, entry.msgstr_plural[1]),
            ]
        yield from ((english, other) for english, other in forms if english and other)


def clean_message(source: str, target: str, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    """The sentence pairs of one message: one for each paragraph, if both sides have as many.

    What is not kept is counted in `dropped` by its reason.
    """
    sources, targets = (_PARAGRAPHS.split(text.strip()) for text in (source, target))
    if len(sources) != len(targets):
        dropped["paragraphs differ"] += 1
        return
    for pair in zip(sources, targets, strict=True):
        cleaned = _clean_paragraph(*pair)
        if isinstance(cleaned, str):
            dropped[cleaned] += 1
        else:
            yield cleaned


def key(text: str) -> str:
    """`text` without case, punctuation, placeholders and numbers' values; twins share their key."""
    words = re.findall(r"[^\W_]+", _PLACEHOLDER.sub(" ", text).casefold())
    return " ".join("0" if word.isdigit() else word for word in words)


def split_of(text: str) -> str:
    """ "train", "val" or "test", decided by the key of `text` alone."""
    digest = hashlib.blake2b(key(text).encode("utf-8"), digest_size=8).digest()
    permille = int.from_bytes(digest, "big") % 1000
    if permille < _TEST_PERMILLE:
        return "test"
    return "val" if permille < _TEST_PERMILLE + _VAL_PERMILLE else "train"


def split_pairs(
    pairs: Iterator[tuple[str, str]], dropped: Counter[str]
) -> dict[str, list[tuple[str, str]]]:
    """Each message once, in one split; no training pair shares a side with val or test, nor does
    val with test, a twin's side included."""
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "val": [], "test": []}
    seen = set()
    for source, target in pairs:
        if key(source) in seen:
            dropped["seen before"] += 1
            continue
        seen.add(key(source))
        splits[split_of(source)].append((source, target))
    held_out: set[str] = set()
    for name in ("test", "val", "train"):
        kept = [pair for pair in splits[name] if key(pair[1]) not in held_out]
        dropped["translation is in val or test"] += len(splits[name]) - len(kept)
        splits[name] = kept
        held_out.update(key(target) for _, target in kept)
    return splits


def catalogs_in(names: list[str], language: str) -> list[str]:
    """The catalogues for `language` among the file `names` of a package, ``.po`` before ``.mo``."""
    codes = f"(?:{language}|{language}[_-]{language})"
    pattern = re.compile(rf"(?:^|.*/){codes}/.*\.(?:po|mo)$|.*[/_-]{codes}\.(?:po|mo)$", re.I)
    found = sorted(name for name in names if pattern.match(name))
    return [n for n in found if n.endswith(".po") or str(Path(n).with_suffix(".po")) not in found]


def _clean_paragraph(source: str, target: str) -> tuple[str, str] | str:
    """The cleaned pair, or the reason why it is dropped."""
    source, target = (html.unescape(text).replace("\\n", " ") for text in (source, target))
    for strip in (_strip_tags, _strip_marks):
        stripped = strip(source, target)
        if stripped is None:
            return "markup differs"
        source, target = stripped
    source, target = (clean(text) for text in _strip_keys(source, target))
    holes = [Counter(_PLACEHOLDER.findall(text)) for text in (source, target)]
    if holes[0] != holes[1]:
        return "placeholders differ"
    if holes[0].total() > MAX_PLACEHOLDERS:
        return "many placeholders"
    return _why_no_sentence(source, target) or (source, target)


def _why_no_sentence(source: str, target: str) -> str | None:
    bare = [_PLACEHOLDER.sub(" ", text) for text in (source, target)]
    words = [_WORD.findall(text) for text in bare]
    if len(words[0]) < MIN_WORDS or len(words[1]) < MIN_WORDS - 1:
        return f"fewer than {MIN_WORDS} words"
    if max(map(len, words)) > MAX_WORDS:
        return f"more than {MAX_WORDS} words"
    if key(source) == key(target):
        return "not translated"
    lengths = sorted(map(len, bare))
    if lengths[1] > 2 * lengths[0] + 10:
        return "lengths differ"
    for text in bare:
        visible = text.replace(" ", "")
        if sum(map(str.isalpha, visible)) < 0.75 * len(visible):
            return "not prose"
    return None


def _strip_tags(source: str, target: str) -> tuple[str, str] | None:
    """Both texts without markup; None where they don't have the same tags, or odd brackets."""
    tags = [Counter(tag.lower() for tag in _TAG.findall(text)) for text in (source, target)]
    if tags[0] != tags[1]:
        return None

    def space(found: re.Match[str]) -> str:
        return "" if (found.group(1) or "").lower() in _INLINE else " "

    return _TAG.sub(space, source), _TAG.sub(space, target)


def _strip_marks(source: str, target: str) -> tuple[str, str] | None:
    """Both texts without the marks of Markdown and reStructuredText, if they have the same."""
    if Counter(_MARKS.findall(source)) != Counter(_MARKS.findall(target)):
        return None
    return _MARKS.sub("", source), _MARKS.sub("", target)


def _strip_keys(source: str, target: str) -> tuple[str, str]:
    """Both texts without the mark before the key to press, where each has one such mark."""
    for mark in (_AMPERSAND_KEY, _UNDERSCORE_KEY):
        if len(mark.findall(source)) == 1 and len(mark.findall(target)) <= 1:
            source, target = mark.sub("", source), mark.sub("", target)
    return source, target
