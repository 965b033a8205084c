"""A self-contained HTML page of headings, text, tables, pictures and videos; everything that it is given is escaped.

Nothing is fetched when the page is opened: styles, pictures and videos are inside, there is no script, and a content
policy in the page's head forbids the rest. Left out: what stands on the page.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

from pi0_fast.reports.pictures import Picture

_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
# Pictures are drawn on white, so they stay on white where the reader prefers dark pages.
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --paper: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117; --card: #151b23; }
}
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 52rem; overflow-wrap: anywhere; }
p.note, figcaption { color: var(--soft); }
p.warning { border-left: 4px solid #d55e00; padding-left: .7rem; }
figure { margin: 1rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
.films { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.films video { display: block; max-width: 100%; border-radius: 6px; background: #000000; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; }
.cards b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .8rem; font-size: .85rem; }
"""


class Page:
    """Collects the parts of a page in order; `render` gives its text."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title = title
        self._parts = [f"<h1>{_escape(title)}</h1>", f'<p class="note">{_escape(subtitle)}</p>']

    def heading(self, text: str) -> None:
        """A section begins."""
        self._parts.append(f"<h2>{_escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{_escape(text)}</p>")

    def warning(self, text: str) -> None:
        """A paragraph that needs the reader's eye."""
        self._parts.append(f'<p class="warning">{_escape(text)}</p>')

    def cards(self, numbers: Sequence[tuple[str, str]]) -> None:
        """A row of (what, value) pairs, the value large."""
        cards = "".join(f"<div><b>{_escape(value)}</b><span>{_escape(what)}</span></div>" for what, value in numbers)
        self._parts.append(f'<div class="cards">{cards}</div>')

    def table(self, rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> None:
        """A table; columns that hold only numbers are aligned to the right. Floats get four significant digits."""
        texts = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in rows]
        numeric = [all(_is_number(row[column]) for row in texts) for column in range(len(headers))]
        marks = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(f"<th{mark}>{_escape(text)}</th>" for mark, text in zip(marks, headers, strict=True))
        body = "\n".join(
            "<tr>" + "".join(f"<td{m}>{_escape(text)}</td>" for m, text in zip(marks, row, strict=True)) + "</tr>"
            for row in texts
        )
        self._parts.append(f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>')

    def show(self, picture: Picture) -> None:
        """A picture; its description stands below it, and is what a screen reader reads."""
        data = base64.b64encode(picture.svg).decode("ascii")
        words = _escape(picture.description)
        image = f'<img alt="{words}" src="data:image/svg+xml;base64,{data}">'
        self._parts.append(f"<figure>{image}<figcaption>{words}</figcaption></figure>")

    def image(self, content: bytes, words: str) -> None:
        """A png file's content, with words below it."""
        data = base64.b64encode(content).decode("ascii")
        image = f'<img alt="{_escape(words)}" src="data:image/png;base64,{data}">'
        self._parts.append(f"<figure>{image}<figcaption>{_escape(words)}</figcaption></figure>")

    def code(self, text: str) -> None:
        """What can be typed, line for line."""
        self._parts.append(f"<pre>{_escape(text)}</pre>")

    def videos(self, films: Sequence[tuple[bytes, str]]) -> None:
        """A row of (content of an mp4 file, words below it); they play when they are clicked, again and again."""
        figures = []
        for content, words in films:
            data = base64.b64encode(content).decode("ascii")
            film = f'<video controls loop muted playsinline src="data:video/mp4;base64,{data}"></video>'
            figures.append(f"<figure>{film}<figcaption>{_escape(words)}</figcaption></figure>")
        self._parts.append(f'<div class="films">{"".join(figures)}</div>')

    def render(self) -> str:
        """The whole page."""
        head = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{_escape(self._title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        )
        return head + "\n".join(self._parts) + "\n</body></html>\n"


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%").replace(",", ""))
    except ValueError:
        return text in ("", "-")
    return True
