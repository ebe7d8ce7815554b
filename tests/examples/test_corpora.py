"""Named corpora, with their homes played by a web server on this machine."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import json
import socket
import tarfile
import threading
import zipfile

import polib
import pytest

from examples.translation.corpora import (
    catalogs,
    default_corpus,
    download,
    files,
    iwslt14,
    messages,
    multi30k,
    open_corpus,
    wmt14,
)
from examples.translation.data import CorpusError
from examples.translation.lines import read_lines


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.path != "/broken.txt":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"only this")


@pytest.fixture
def home(tmp_path):
    """(folder, url) of a web server."""
    folder = tmp_path / "home"
    folder.mkdir()
    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def nowhere():
    """A url at which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def text(lines):
    return "".join(f"{line}\n" for line in lines).encode()


def pack(path, members, mode="w:gz"):
    """A tar file of {name: bytes}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            tar.addfile(item, io.BytesIO(content))


def all_lines(pairs):
    return [[line for pair in pairs for line in read_lines(pair[side])] for side in (0, 1)]


class TestDownload:
    def test_checksums_recorded_then_checked(self, home, tmp_path):
        folder, url = home
        (folder / "a.txt").write_bytes(b"first")
        cache = tmp_path / "cache"
        path = download.fetch(f"{url}/a.txt", cache)
        assert path.read_bytes() == b"first"
        entry = json.loads((cache / "checksums.json").read_text())["a.txt"]
        digest = hashlib.sha256(b"first").hexdigest()
        assert entry == {"url": f"{url}/a.txt", "sha256": digest, "bytes": 5}

        (folder / "a.txt").unlink()
        assert download.fetch(f"{url}/a.txt", cache) == path
        path.write_bytes(b"worse")
        with pytest.raises(CorpusError, match=f"but {digest} was recorded at its first download"):
            download.fetch(f"{url}/a.txt", cache)
        path.unlink()
        (folder / "a.txt").write_bytes(b"changed at home")
        with pytest.raises(CorpusError, match="was recorded at its first download"):
            download.fetch(f"{url}/a.txt", cache)

    def test_failures_are_one_sentence_and_leave_nothing(self, home, nowhere, tmp_path):
        cache = tmp_path / "cache"
        with pytest.raises(CorpusError, match=r"can't download .*/none.txt \(.*[Nn]ot found"):
            download.fetch(f"{home[1]}/none.txt", cache)
        with pytest.raises(CorpusError, match="broke off after 9 of 100 bytes"):
            download.fetch(f"{home[1]}/broken.txt", cache)
        (home[0] / "page.tgz").write_bytes(b"<html>Please log in</html>")
        with pytest.raises(CorpusError, match="page.tgz gave is no gzip file"):
            download.fetch(f"{home[1]}/page.tgz", cache)
        with pytest.raises(CorpusError, match="can't download .*refused"):
            download.fetch(f"{nowhere}/a.txt", cache)
        assert list(cache.iterdir()) == []

    def test_whether_a_home_answers(self, home, nowhere):
        (home[0] / "a.txt").write_bytes(b"x")
        assert download.why_no_answer(f"{home[1]}/a.txt") is None
        assert "not found" in download.why_no_answer(f"{home[1]}/b.txt").lower()
        assert "refused" in download.why_no_answer(f"{nowhere}/a.txt")

    def test_a_home_that_hangs(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/a"
            assert download.why_no_answer(url, seconds=0.2) is not None

    def test_archive_without_the_member(self, tmp_path):
        pack(tmp_path / "a.tgz", {"x/a.en": b"a\n"})
        (path,) = download.extract(tmp_path / "a.tgz", ["x/a.en"], tmp_path / "out")
        assert path.read_bytes() == b"a\n"
        with pytest.raises(CorpusError, match="a.tgz lacks x/b.en"):
            download.extract(tmp_path / "a.tgz", ["x/a.en", "x/b.en"], tmp_path / "out")


class TestMulti30k:
    @pytest.fixture
    def served(self, home, monkeypatch):
        for stem in ("train", "val", "test_2016_flickr"):
            for language in ("en", "de"):
                content = gzip.compress(text([f"{stem} {language} {n}" for n in range(3)]))
                (home[0] / f"{stem}.{language}.gz").write_bytes(content)
        monkeypatch.setattr(multi30k, "HOME", home[1])

    def test_load(self, served, tmp_path):
        corpus = open_corpus("multi30k", "de", "en", tmp_path / "cache")
        assert (corpus.name, corpus.smoke) == ("multi30k", False)
        assert all_lines(corpus.train)[0] == ["train de 0", "train de 1", "train de 2"]
        assert all_lines(corpus.test)[1][2] == "test_2016_flickr en 2"

    def test_is_the_default_where_its_home_answers(self, served, tmp_path, monkeypatch, nowhere):
        assert default_corpus(cache=tmp_path) == ("multi30k", "its home answers")
        open_corpus("multi30k", cache=tmp_path)
        monkeypatch.setattr(multi30k, "HOME", nowhere)
        assert default_corpus(cache=tmp_path) == ("multi30k", "it was downloaded before")
        name, why = default_corpus(cache=tmp_path / "other")
        assert name == "catalogs" and "the home of multi30k does not answer" in why
        name, why = default_corpus("en", "it", tmp_path)
        assert name == "catalogs" and "it has no 'it'" in why


def sgm(lines):
    segments = "".join(f'<seg id="{n}"> {line} </seg>\n' for n, line in enumerate(lines, 1))
    return f'<refset setid="x">\n<doc docid="y">\n<p>\n{segments}</p>\n</doc>\n'.encode()


@pytest.fixture
def wmt_home(home, monkeypatch):
    folder, url = home
    both = {"de": ("de", "en"), "fr": ("fr", "en")}
    europarl, crawl, news, un = {}, {}, {}, {}
    dev, test = {}, {}
    for other, languages in both.items():
        for language in languages:
            europarl[f"training/europarl-v7.{other}-en.{language}"] = text([f"europarl {language}"])
            crawl[f"commoncrawl.{other}-en.{language}"] = text([f"crawl {language}"])
            news[f"training/news-commentary-v9.{other}-en.{language}"] = text([f"news {language}"])
            un[f"un/undoc.2000.fr-en.{language}"] = text([f"un {language}"])
            dev[f"dev/newstest2013.{language}"] = text([f"2013 {language}"])
            for kind in ("src", "ref"):
                name = f"test-full/newstest2014-{other}en-{kind}.{language}.sgm"
                test[name] = sgm([f"2014 {language}", "zwei\u2028 two"])
    giga = {
        f"giga-fren.release2.fixed.{language}.gz": gzip.compress(text([f"giga {language}"]))
        for language in ("en", "fr")
    }
    pack(folder / "wmt13/training-parallel-europarl-v7.tgz", europarl)
    pack(folder / "wmt13/training-parallel-commoncrawl.tgz", crawl)
    pack(folder / "wmt14/training-parallel-nc-v9.tgz", news)
    pack(folder / "wmt13/training-parallel-un.tgz", un)
    pack(folder / "wmt10/training-giga-fren.tar", giga, "w")
    pack(folder / "wmt14/dev.tgz", dev)
    pack(folder / "wmt14/test-full.tgz", test)
    monkeypatch.setattr(wmt14, "HOME", url)


def test_wmt14(wmt_home, tmp_path):
    german = open_corpus("wmt14-ende", "en", "de", tmp_path / "cache")
    assert all_lines(german.train) == [
        ["europarl en", "crawl en", "news en"],
        ["europarl de", "crawl de", "news de"],
    ]
    assert all_lines(german.val) == [["2013 en"], ["2013 de"]]
    assert all_lines(german.test) == [["2014 en", "zwei\u2028 two"], ["2014 de", "zwei\u2028 two"]]

    french = open_corpus("wmt14-enfr", "en", "fr", tmp_path / "cache")
    assert all_lines(french.train)[1] == ["europarl fr", "crawl fr", "news fr", "un fr", "giga fr"]
    assert all_lines(french.test)[1][0] == "2014 fr"


def test_iwslt14(home, tmp_path, monkeypatch):
    def training(language):
        about = ["<url>http://x</url>", "<keywords>talks</keywords>", "<talkid>1</talkid>"]
        told = [f"<title>Titel {language}</title>", f"<description>x {language}</description>"]
        return text([*about, *told, *(f" {language} {n} " for n in range(3, 47))])

    members = {f"de-en/train.tags.de-en.{side}": training(side) for side in ("de", "en")}
    for name in ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012"):
        for side in ("de", "en"):
            members[f"de-en/IWSLT14.{name}.de-en.{side}.xml"] = sgm([f"{name} {side}"])
    pack(home[0] / "de-en.tgz", members)
    monkeypatch.setattr(iwslt14, "HOME", home[1])
    corpus = open_corpus("iwslt14", "de", "en", tmp_path / "cache")
    train, val = all_lines(corpus.train), all_lines(corpus.val)
    assert train[0][:3] == ["Titel de", "x de", "de 3"]
    assert [len(train[0]), len(val[0])] == [44, 2]
    assert val == [["de 23", "de 46"], ["en 23", "en 46"]]
    assert all_lines(corpus.test)[1] == [
        f"{name} en" for name in ("TED.dev2010", "TEDX.dev2012", *(f"TED.tst201{n}" for n in "012"))
    ]


class TestFiles:
    @pytest.mark.parametrize(
        "names",
        [
            ("train.{}", "val.{}", "test_2016_flickr.{}"),
            ("train.{}.gz", "valid.{}", "test.{}.xz"),
            ("train.de-en.{}", "newstest2013.en-de.{}", "newstest2014.en-de.{}"),
        ],
    )
    def test_names(self, tmp_path, names):
        for name in names:
            for language in ("en", "de"):
                (tmp_path / name.format(language)).write_bytes(b"x\n")
        corpus = files.load(tmp_path, "en", "de")
        found = [pair for split in (corpus.train, corpus.val, corpus.test) for pair in split]
        assert found == [tuple(tmp_path / n.format(side) for side in ("en", "de")) for n in names]

    def test_a_missing_split_says_what_is_looked_for(self, tmp_path):
        for name in ("train.en", "train.de", "val.en", "val.de"):
            (tmp_path / name).write_bytes(b"x\n")
        with pytest.raises(CorpusError, match=r"no test files; looked for test.en and test.de, "):
            files.load(tmp_path, "en", "de")


CATALOG = r"""
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\n"

msgid "The file could not be opened."
msgstr "Die Datei konnte nicht geöffnet werden."

#, fuzzy
msgid "A guess of a translation."
msgstr "Geraten."

msgid "Not translated"
msgstr ""

#, python-format
msgid "%(count)s file was deleted."
msgid_plural "%(count)s files were deleted."
msgstr[0] "%(count)s Datei wurde gelöscht."
msgstr[1] "%(count)s Dateien wurden gelöscht."

#. Default: "You can search the whole site here."
msgid "help_search"
msgstr "Hier können Sie die ganze Website durchsuchen."

#~ msgid "An obsolete message of old."
#~ msgstr "Eine alte Nachricht."
"""


class TestMessages:
    def test_read_po_and_mo(self, tmp_path):
        expected = [
            ("The file could not be opened.", "Die Datei konnte nicht geöffnet werden."),
            ("%(count)s file was deleted.", "%(count)s Datei wurde gelöscht."),
            ("%(count)s files were deleted.", "%(count)s Dateien wurden gelöscht."),
        ]
        symbolic = "Hier können Sie die ganze Website durchsuchen."
        found = list(messages.read_catalog(CATALOG.encode(), ".po"))
        assert found == [*expected, ("You can search the whole site here.", symbolic)]
        polib.pofile(CATALOG).save_as_mofile(str(tmp_path / "x.mo"))
        found = list(messages.read_catalog((tmp_path / "x.mo").read_bytes(), ".mo"))
        assert sorted(found) == sorted([*expected, ("help_search", symbolic)])

    @pytest.mark.parametrize(
        ("source", "target", "kept"),
        [
            ("_Open the selected file", "Die _gewählte Datei öffnen", "Open the selected file"),
            ("&Open the selected file", "Ausgewählte Datei &amp;öffnen", "Open the selected file"),
            ("Save the file_name right now", "Den file_name sofort sichern", "Save the file_name "),
            ("Search &amp; replace in files", "Suchen &amp; Ersetzen in Dateien", "Search & repl"),
            ("Read the <b>whole</b> file", "Die <b>ganze</b> Datei lesen", "Read the whole file"),
            ("Read it<br/>line by line", "Zeile<br/>für Zeile lesen", "Read it line by line"),
            (
                "Hello {name}, come\\nin here",
                "Hallo {name}, komm\\nherein",
                "Hello {name}, come in",
            ),
            ("``x`` is not a file", "``x`` ist keine Datei", "x is not a file"),
        ],
    )
    def test_cleaned(self, source, target, kept):
        dropped = messages.Counter()
        ((english, german),) = messages.clean_message(source, target, dropped)
        assert english.startswith(kept) and not dropped
        assert not set("<>`\\") & set(german) and "_g" not in german and "&ö" not in german

    @pytest.mark.parametrize(
        ("source", "target", "reason"),
        [
            ("Open file", "Datei öffnen", "fewer than 4 words"),
            ("box_search_in_all_files", "Suche in allen Dateien", "fewer than 4 words"),
            ("The file %s is gone now", "Die Datei ist jetzt weg", "placeholders differ"),
            ("The file %s is gone now", "Die Datei %d ist jetzt weg", "placeholders differ"),
            ("{a} and {b} or {c} are here", "{a} und {b} oder {c} sind hier", "many placeholders"),
            ("The <b>file</b> is gone now", "Die Datei ist jetzt weg", "markup differs"),
            ("The **file** is gone now", "Die Datei ist jetzt weg", "markup differs"),
            ("The file is gone now", "the file is gone now!", "not translated"),
            ("The file is gone now", "Die Datei ist jetzt weg, " * 5, "lengths differ"),
            ("word " * 61, "Wort " * 61, "more than 60 words"),
            ("a b c d 12345678901234", "e f g h 12345678901234", "not prose"),
            ("One paragraph of text\n\nand another", "Ein Absatz Text", "paragraphs differ"),
        ],
    )
    def test_dropped(self, source, target, reason):
        dropped = messages.Counter()
        assert list(messages.clean_message(source, target, dropped)) == []
        assert dropped == {reason: 1}

    def test_paragraphs_become_pairs(self):
        dropped = messages.Counter()
        source = "This is the first one.\n\nAnd this is\nthe second one.\n \nShort."
        target = "Das ist der erste.\n\nUnd das ist\nder zweite.\n\nKurz."
        assert list(messages.clean_message(source, target, dropped)) == [
            ("This is the first one.", "Das ist der erste."),
            ("And this is the second one.", "Und das ist der zweite."),
        ]
        assert dropped == {"fewer than 4 words": 1}

    def test_twins_never_part(self):
        variants = [
            "The file {name} has 3 lines.",
            "the file %s has 12 lines",
            "THE FILE HAS 3 LINES!",
        ]
        assert len({messages.key(text) for text in variants}) == 1
        many = [f"Message {'abcdefghij'[n % 10] * (n // 10 + 1)} is here" for n in range(2000)]
        pairs = [(text, f"{text} auf Deutsch {n % 700}") for n, text in enumerate(many)]
        pairs += [(f"{source.upper()}!", "anders") for source, _ in pairs[:50]]
        pairs += [(f"Another way to say {n}x", pairs[n][1].upper()) for n in range(500)]
        dropped = messages.Counter()
        splits = messages.split_pairs(iter(pairs), dropped)
        assert dropped["seen before"] == 50
        assert dropped["translation is in val or test"] > 0
        assert sum(map(len, splits.values())) + dropped.total() == len(pairs)
        for side in (0, 1):
            keys = {name: {messages.key(p[side]) for p in found} for name, found in splits.items()}
            assert not keys["train"] & (keys["val"] | keys["test"])
            assert not keys["val"] & keys["test"]
        assert 40 < len(splits["test"]) < 200

    def test_the_split_does_not_depend_on_the_other_messages(self):
        sources = [f"This is message number {chr(97 + n % 26) * (n // 26 + 1)}" for n in range(300)]
        once = messages.split_pairs(((s, f"deutsch {s}") for s in sources), messages.Counter())
        half = messages.split_pairs(((s, f"deutsch {s}") for s in sources[::2]), messages.Counter())
        for name in once:
            assert set(half[name]) == set(once[name]) & {(s, f"deutsch {s}") for s in sources[::2]}

    def test_which_catalogues(self):
        names = [
            "a/locale/de/LC_MESSAGES/django.mo",
            "a/locale/de/LC_MESSAGES/django.po",
            "a/locale/de_DE/LC_MESSAGES/x.mo",
            "a/locale/de_Informal/LC_MESSAGES/x.po",
            "a/locale/de_AT/LC_MESSAGES/x.po",
            "a/locale/nde/LC_MESSAGES/x.po",
            "b/locale/de.po",
            "b/x-de.po",
            "b/abcde.po",
            "b/locale/de/readme.txt",
        ]
        assert messages.catalogs_in(names, "de") == [names[i] for i in (1, 2, 6, 7)]


def wheel(folder, name, catalog):
    """A wheel that holds nothing but one German catalogue."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Python: >=3.99\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/locale/de/LC_MESSAGES/{name}.po", catalog)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def catalog_of(count, start=0):
    letters = "abcdefghijklmnopqrstuvwxyz"
    entries = [
        f'msgid "The program opens the {letters[n % 26]}{letters[n // 26]} window."\n'
        f'msgstr "Das Programm öffnet das {letters[n % 26]}{letters[n // 26]}-Fenster."\n'
        for n in range(start, start + count)
    ]
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'
    return "\n".join([header, *entries])


class TestCatalogs:
    @pytest.fixture
    def index(self, tmp_path, monkeypatch):
        """A package index on disk, which alone pip uses."""
        folder = tmp_path / "index"
        wheel(folder, "first", catalog_of(200))
        wheel(folder, "second", catalog_of(200, start=100))
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        return folder

    def test_fetched_by_pip_even_for_another_python(self, index, tmp_path, capsys):
        packages = ("first==1.0", "missing==1.0", "second==1.0")
        corpus = catalogs.load("en", "de", tmp_path, packages, min_pairs=200)
        splits = [all_lines(split) for split in (corpus.train, corpus.val, corpus.test)]
        assert sum(len(split[0]) for split in splits) == 300
        for english, german in splits:
            for source, target in zip(english, german, strict=True):
                word = source.split()[4]
                assert target == f"Das Programm öffnet das {word}-Fenster."
        assert corpus.smoke and "smoke corpus" in corpus.notes[0]
        assert corpus.notes[1].startswith("left out missing==1.0: ")
        assert "left out missing==1.0" in capsys.readouterr().err
        details = corpus.details["packages"]
        assert {name: entry["pairs"] for name, entry in details.items()} == {
            "first==1.0": 200,
            "second==1.0": 200,
        }
        digest = hashlib.sha256((index / "first-1.0-py3-none-any.whl").read_bytes()).hexdigest()
        assert details["first==1.0"]["sha256"] == digest

    def test_kept_unless_something_was_missing(self, index, tmp_path):
        packages = ("first==1.0", "third==1.0")
        catalogs.load("en", "de", tmp_path, packages, min_pairs=100)
        wheel(index, "third", catalog_of(50, start=300))
        corpus = catalogs.load("en", "de", tmp_path, packages, min_pairs=100)
        assert len(corpus.details["packages"]) == 2 and len(corpus.notes) == 1
        for path in index.iterdir():
            path.unlink()
        again = catalogs.load("de", "en", tmp_path, packages, min_pairs=100)
        assert again.details == corpus.details
        assert all_lines(again.train) == all_lines(corpus.train)[::-1]

    def test_too_little_is_an_error(self, index, tmp_path):
        message = "only .* training pairs, 4000 are needed; could not fetch missing==1.0"
        with pytest.raises(CorpusError, match=message):
            catalogs.load("en", "de", tmp_path, ("first==1.0", "missing==1.0"))
        assert not (tmp_path / "catalogs").exists()

    def test_every_package_has_its_version(self):
        assert all(package.count("==") == 1 for package in catalogs.PACKAGES)
