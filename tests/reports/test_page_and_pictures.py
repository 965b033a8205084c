"""Pages and pictures: what is escaped, what they look for outside, what they leave behind in matplotlib."""

from __future__ import annotations

import base64
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest

from pi0_fast.reports import pictures
from pi0_fast.reports.page import Page
from pi0_fast.reports.pictures import Picture
from pi0_fast.types import UsageError

EVIL = '<script>alert("1")</script>&\''


class Reader(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.texts += [value or "" for name, value in attrs if name == "alt"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_escapes_everything_and_fetches_nothing() -> None:
    page = Page(EVIL, EVIL)
    page.heading(EVIL)
    page.text(EVIL)
    page.warning(EVIL)
    page.cards([(EVIL, EVIL)])
    page.table([[EVIL, 1.23456], [EVIL, 2]], [EVIL, "x"])
    page.show(Picture("name", EVIL, b"<svg/>", b""))
    text = page.render()
    found = Reader(text)
    assert "script" not in found.tags
    assert found.texts.count(EVIL) == 13
    assert found.sources == ["data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()]
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert "1.235" in found.texts


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    page = Page("t", "s")
    page.table([["a", "1.5%", ""], ["b", "-", 3]], ["x", "y", "z"])
    assert page.render().count('<td class="number">') == 4


def errors_of(labels: list[str]) -> Picture:
    values = np.linspace(0.1, 1.0, len(labels))
    return pictures.dimension_errors(labels, values, 3 * values, values / 10, values / 20, values / 5)


@pytest.mark.parametrize(
    "name", ["a$b^{$", "$x_1$", "名前", "\\frac{", "", "two\nlines", "x" * 200, "<b>&\"'", "_a_", "%s{}"]
)
def test_any_name_can_be_drawn(name: str) -> None:
    picture = errors_of([name, "ordinary"])
    assert picture.png.startswith(b"\x89PNG")
    assert b"<svg" in picture.svg


def test_text_is_drawn_as_it_is() -> None:
    assert pictures._plain("a$b_1 名\tc") == r"a\$b_1 ? c"


def test_equal_numbers_give_equal_files_whatever_the_users_settings() -> None:
    first = errors_of(["a", "b"])
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        again = errors_of(["a", "b"])
        assert dict(matplotlib.rcParams) == before
    assert first == again


def test_edge_cases_are_drawn() -> None:
    one = np.ones((1, 1), np.float32)
    zero = np.zeros(1)
    for picture in (
        pictures.token_lengths([3], 1, 1.0, 1.0),
        pictures.dimension_errors(["a"], zero, zero, zero, zero, zero),
        pictures.chunk("c", "t", ["a"], one, one, zero, zero + 1),
        pictures.chunk("c", "t", ["a"] * 40, *[np.ones((5, 40), np.float32)] * 2, np.zeros(40), np.ones(40)),
        pictures.rate_distortion([1.0], [0.0], [0.0], ["x1"], (1.0, 0.0)),
        pictures.rate_distortion_plane({}, (1.0, 0.0)),
        pictures.rate_distortion_plane({str(i): ([1.0, 2.0], [0.2, 0.1]) for i in range(7)}, (1.0, 0.1)),
        pictures.rate_distortion([5.0, 5.0], [0.1, 0.1], [0.1, 0.1], ["1", "2"], (5.0, 0.1)),
        pictures.vocabulary_use(np.zeros(4, int), np.ones(4, int), "bytes"),
        pictures.episode_lengths(np.array([0, 7]), np.array([1]), 10.0, 7),
        pictures.distributions(["a"], np.array([[0.0, 1.0]]), np.array([[5]]), [(0.0, 0.0)], [0]),
        pictures.spreads(["a"], dict.fromkeys(("min", "q01", "q10", "q50", "q90", "q99", "max"), zero), [0], []),
        pictures.spreads(["a"], dict.fromkeys(("min", "q01", "q10", "q50", "q90", "q99", "max"), zero + 1000), [], []),
        pictures.modes(["A"], [True], [0.0], [1.0]),
    ):
        assert picture.png.startswith(b"\x89PNG")


def test_of_many_dimensions_the_worst_are_drawn() -> None:
    original = np.zeros((5, 40), np.float32)
    decoded = original + np.arange(40, dtype=np.float32)
    picture = pictures.chunk("c", "t", [f"d{i}" for i in range(40)], original, decoded, np.zeros(40), np.ones(40))
    assert f"The {pictures.MOST_PANELS} of 40 dimensions" in picture.description


def test_sizes_of_ids_are_counted_in_doubling_bins() -> None:
    labels, uses, ids = pictures.size_shares(np.array([5, 0, 3, 2]), np.array([1, 2, 4, 5]))
    assert labels == ["1", "2", "3-4", "5-8"]
    assert uses.tolist() == [0.5, 0.0, 0.3, 0.2]
    assert ids.tolist() == [0.25] * 4


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", {"matplotlib": None}.get)
    with pytest.raises(UsageError, match=r"pip install 'pi0-fast\[report\]'"):
        pictures.require_matplotlib()


def test_matplotlib_is_imported_only_to_draw_and_pyplot_never() -> None:
    code = (
        "import sys, numpy as np\n"
        "import pi0_fast.inspection, pi0_fast.fitting\n"
        "from pi0_fast.reports import pictures\n"
        "assert 'matplotlib' not in sys.modules\n"
        "pictures.token_lengths([1, 2], 3, 3.5, 4.0)\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
