"""The pictures of reports, drawn from plain numbers: token lengths, errors, chunks, scales, vocabularies, datasets.

matplotlib is an extra and is imported only when something is drawn. Its global state is left as it was; no settings of
the user's are taken over, so that equal numbers give equal files. Colours are those of Okabe and Ito, which people with
any colour vision tell apart; pictures are drawn on white. Left out: where the numbers come from, and the page around.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pi0_fast.types import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[Any]

BLUE, ORANGE, GREEN, VERMILLION, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#7f7f7f"
_WIDTH = 9.0  # inches
_ROW = 0.23  # of a dimension in a list of dimensions
#: More panels than this are not readable; the picture says how many are left out.
MOST_PANELS = 32
_STYLE = {
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "figure.facecolor": "white",
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.hashsalt": "pi0-fast",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@dataclass(frozen=True)
class Picture:
    """A drawn picture: `name` (of its file), `description` in words, and the files' contents."""

    name: str
    description: str
    svg: bytes
    png: bytes


def require_matplotlib() -> None:
    """Refuse work whose pictures could not be drawn at its end.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a report needs matplotlib: pip install 'pi0-fast[report]'")


def draw_picture(name: str, description: str, height: float, draw: Callable[[Figure], None]) -> Picture:
    """Both files of a picture of `height` inches that `draw` puts on an empty figure."""
    require_matplotlib()
    import matplotlib.style
    from matplotlib.figure import Figure

    files: list[bytes] = []
    with matplotlib.style.context(_STYLE, after_reset=True):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        # Placing everything is the slow part; both files share it.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=110, metadata=metadata)
            files.append(buffer.getvalue())
    return Picture(name, description, *files)


def _plain(text: str) -> str:
    """Text that matplotlib draws as it is: no formulas between dollars, no characters that its font lacks."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    known = (c if font.get_char_index(ord(c)) else "?" for c in " ".join(text.split()))
    return "".join(known).replace("$", r"\$")


def _labels(labels: Sequence[str], longest: int = 34) -> list[str]:
    """Labels of dimensions, of bounded length."""
    return [_plain(text if len(text) <= longest else text[: longest - 1] + "…") for text in labels]


def _dimension_axis(axes: Axes, labels: Sequence[str]) -> npt.NDArray[np.int64]:
    """A vertical axis with one row for each dimension, the first on top; returns the rows' positions."""
    rows = np.arange(len(labels))
    axes.set_yticks(rows, _labels(labels))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    return rows


def _ticks(most: int = 9, *, whole: bool = False) -> Any:
    """Few ticks at round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=most, integer=whole, steps=[1, 2, 2.5, 5, 10])


def _log_axis(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis from low to high; where that is few decades, the ticks between them are written out too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    if high / low < 4.0:
        middle = (low * high) ** 0.5
        axis.axes.set(**{f"{axis.axis_name}lim": (middle / 3.0, middle * 3.0)})
    if high / low < 1e3:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _columns(panels: int) -> int:
    """Columns of a grid of panels."""
    return min(panels, 3 if panels in (5, 6, 9) else 4)


def _list_height(count: int) -> float:
    return 1.4 + _ROW * max(count, 4)


# --- of a tokenizer ---------------------------------------------------------------------------------------------------


def token_lengths(counts: Sequence[int], first: int, mean: float, p99: float) -> Picture:
    """How many chunks have how many tokens: ``counts[i]`` chunks have ``first + i``."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.bar(np.arange(first, first + len(counts)), counts, width=1.0, color=BLUE, edgecolor="white", linewidth=0.3)
        axes.axvline(mean, color=VERMILLION, label=f"mean {mean:.1f}")
        axes.axvline(p99, color=VERMILLION, linestyle="--", label=f"99th percentile {p99:.1f}")
        axes.set(xlabel="tokens per chunk", ylabel="chunks")
        axes.xaxis.set_major_locator(_ticks(whole=True))
        axes.yaxis.set_major_locator(_ticks(whole=True))
        figure.legend(loc="outside upper right", ncols=2)

    return draw_picture("token_lengths", "Tokens per chunk: how many chunks have how many tokens.", 3.0, draw)


def dimension_errors(
    labels: Sequence[str],
    rmse: FloatArray,
    worst: FloatArray,
    rounding_share: FloatArray,
    clipping_share: FloatArray,
    clipped: FloatArray,
) -> Picture:
    """Errors of each dimension.

    Args:
        labels: of the D dimensions.
        rmse, worst: [D], in the data's own units.
        rounding_share, clipping_share: [D], RMSE by rounding and by clipping alone as a share of the dimension's range.
        clipped: [D], share of the values that are clipped.
    """

    def draw(figure: Figure) -> None:
        units, ranges, shares = figure.subplots(1, 3, sharey=True, width_ratios=[5, 3, 2])
        rows = _dimension_axis(units, labels)
        known = rmse > 0
        units.hlines(rows[known], rmse[known], worst[known], color="#c8c8c8", linewidth=1.5, zorder=1)
        units.plot(rmse[known], rows[known], "o", color=BLUE, markersize=5, label="RMSE")
        units.plot(worst[known], rows[known], "D", color=VERMILLION, markersize=4, label="worst")
        if known.any():
            _log_axis(units.xaxis, float(rmse[known].min()), float(worst[known].max()))
        for row in rows[~known]:
            units.text(
                0.01, row, "no error", transform=units.get_yaxis_transform(), va="center", color=GREY, fontsize=8
            )
        units.set(xlabel="data units (logarithmic)", title="error")
        ranges.barh(rows - 0.2, 100 * rounding_share, height=0.36, color=BLUE, label="rounding")
        ranges.barh(rows + 0.2, 100 * clipping_share, height=0.36, color=ORANGE, label="clipping")
        ranges.set(xlabel="% of the dimension's range", title="RMSE by cause")
        shares.barh(rows, 100 * clipped, height=0.6, color=ORANGE)
        shares.set(xlabel="% of values", title="clipped")
        for axes in (ranges, shares):
            axes.set_xlim(left=0.0)
            if axes.get_xlim()[1] < 1e-9 or not axes.dataLim.width:
                axes.set_xlim(0.0, 1.0)
        handles = [*units.get_legend_handles_labels()[0], *ranges.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)

    words = (
        "Error of each dimension: in data units; by rounding and by clipping, relative to its range; values clipped."
    )
    return draw_picture("errors", words, _list_height(len(labels)) + 0.3, draw)


def chunk(
    name: str,
    title: str,
    labels: Sequence[str],
    original: FloatArray,
    decoded: FloatArray,
    low: FloatArray,
    high: FloatArray,
) -> Picture:
    """One chunk, recorded and decoded, [H, D] in the data's own units, and the normaliser's range [D] where it is near.

    Of more than `MOST_PANELS` dimensions those are drawn whose error is the largest part of their range.
    """
    share = np.abs(decoded.astype(np.float64) - original).max(axis=0) / (high - low)
    shown = np.sort(np.argsort(-share, kind="stable")[:MOST_PANELS])
    columns = _columns(len(shown))
    lines = -(-len(shown) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(lines, columns, sharex=True, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(shown):
                axes.set_visible(False)
                continue
            dim = int(shown[place])
            _chunk_panel(axes, original[:, dim], decoded[:, dim], float(low[dim]), float(high[dim]))
            axes.set_title(_labels([labels[dim]], 27)[0], fontsize=8)
            below = place + columns  # a hidden panel has no axis to share
            if below >= len(shown):
                axes.tick_params(labelbottom=True)
        figure.supxlabel("step", fontsize=9)
        handles, words = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, words, loc="outside upper right", ncols=3)

    left_out = (
        f" The {len(shown)} of {len(labels)} dimensions with the largest errors." if len(shown) < len(labels) else ""
    )
    words = f"{title}: recorded against decoded, in data units, on scales of their own; dotted: the normaliser's range."
    return draw_picture(name, words + left_out, 0.7 + 1.25 * lines, draw)


def _chunk_panel(axes: Axes, original: FloatArray, decoded: FloatArray, low: float, high: float) -> None:
    steps = np.arange(len(original))
    marker = "o" if len(steps) < 3 else ""  # a line of one point is nothing
    axes.plot(steps, original, marker=marker, color="#333333", linewidth=1.6, linestyle="-", label="recorded")
    axes.plot(steps, decoded, marker=marker, color=VERMILLION, linewidth=1.2, linestyle=(0, (4, 1.5)), label="decoded")
    bottom, top = (float(f(np.concatenate([original, decoded]))) for f in (np.min, np.max))
    # A flat curve is drawn flat, not blown up to its rounding error.
    margin = max(0.1 * (top - bottom), 0.02 * (high - low))
    axes.set_ylim(bottom - margin, top + margin)
    for limit in (low, high):
        axes.axhline(
            limit, color=BLUE, linestyle=":", linewidth=1.0, label="normaliser's range" if limit == low else None
        )
    axes.tick_params(labelsize=7)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.set_major_locator(_ticks(5, whole=True))
    axes.yaxis.set_major_locator(_ticks(4))


def rate_distortion(
    tokens: Sequence[float],
    errors: Sequence[float],
    rounding: Sequence[float],
    texts: Sequence[str],
    own: tuple[float, float],
) -> Picture:
    """Tokens per chunk against normalised RMSE of refitted tokenizers, and where the inspected one stands.

    Args:
        tokens: mean tokens per chunk of each refit.
        errors, rounding: its normalised RMSE in all, and by rounding alone.
        texts: its scale.
        own: (tokens, error) of the inspected tokenizer.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(tokens, errors, "o-", color=BLUE, label="refitted, whole error")
        axes.plot(tokens, rounding, "s--", color=GREEN, markersize=4, label="refitted, rounding alone")
        for x, y, text in zip(tokens, errors, texts, strict=True):
            axes.annotate(_plain(text), (x, y), xytext=(0, 10), textcoords="offset points", ha="center", fontsize=8)
        axes.plot(*own, "*", color=VERMILLION, markersize=13, label="this tokenizer")
        axes.set(xlabel="tokens per chunk, mean", ylabel="RMSE, normalised units")
        lowest = min(*rounding, own[1])
        if lowest > 0:
            _log_axis(axes.yaxis, lowest, max(*errors, own[1]))
            axes.set_ylabel("RMSE, normalised units (logarithmic)")
        axes.margins(0.08, 0.15)
        figure.legend(loc="outside upper right", ncols=3)

    words = (
        "Rate and distortion of tokenizers refitted at other scales (beside the points), of the same vocabulary size."
    )
    return draw_picture("rate_distortion", words, 3.6, draw)


def rate_distortion_plane(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], own: tuple[float, float]
) -> Picture:
    """Tokens per chunk against rounding RMSE of several kinds of encoders, and where the inspected tokenizer stands.

    Args:
        lines: of each kind, the mean tokens per chunk and the normalised RMSE of its refits.
        own: (tokens, error) of the inspected tokenizer.
    """
    colours = (GREY, BLUE, BLUE, ORANGE, ORANGE)
    dashes = ("-", "--", "-", "--", "-")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (kind, (tokens, errors)) in enumerate(lines.items()):
            colour, dash = colours[number % len(colours)], dashes[number % len(dashes)]
            axes.plot(tokens, errors, marker="o", markersize=4, label=kind, color=colour, linestyle=dash)
        axes.plot(*own, "*", color=VERMILLION, markersize=13, label="this tokenizer")
        every = [error for _, errors in lines.values() for error in errors] + [own[1]]
        axes.set(xlabel="tokens per chunk, mean", ylabel="RMSE by rounding, normalised units")
        if min(every) > 0:
            _log_axis(axes.yaxis, min(every), max(every))
            axes.set_ylabel("RMSE by rounding, normalised units (logarithmic)")
        axes.margins(0.08, 0.1)
        figure.legend(loc="outside upper right", ncols=3)

    words = (
        "Rate and distortion of other encoders with vocabularies of the same size, each at several scales: to the left "
        "are fewer tokens, below is less error."
    )
    return draw_picture("rate_distortion_plane", words, 3.8, draw)


def vocabulary_use(uses: FloatArray, sizes: FloatArray, unit: str) -> Picture:
    """How often the ids are used.

    Args:
        uses: [V], how often each id occurs.
        sizes: [V], how many coefficients (or bytes: `unit`) each id stands for.
    """
    used = np.sort(uses[uses > 0])[::-1]

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import NullFormatter

        zipf, lengths = figure.subplots(1, 2, width_ratios=[3, 2])
        ranks = np.arange(1, len(used) + 1)
        zipf.plot(ranks, used, ".-", color=BLUE, markersize=3, linewidth=1, label="ids in use")
        if len(used):
            zipf.plot(ranks, used[0] / ranks, color=GREY, linestyle="--", linewidth=1, label="Zipf's law, 1 / rank")
            zipf.set(xscale="log", yscale="log", ylim=(0.7, 1.6 * used[0]))
            zipf.xaxis.set_minor_formatter(NullFormatter())
            zipf.yaxis.set_minor_formatter(NullFormatter())
        zipf.set(xlabel="rank of the id", ylabel="uses", title=f"{len(used)} of {len(uses)} ids are used")
        zipf.legend()
        labels, shares, ids = size_shares(uses, sizes)
        rows = np.arange(len(labels))
        lengths.barh(rows - 0.2, 100 * ids, height=0.38, color="#b5b5b5", label="% of ids")
        lengths.barh(rows + 0.2, 100 * shares, height=0.38, color=BLUE, label="% of uses")
        lengths.set_yticks(rows, labels)
        lengths.invert_yaxis()
        lengths.set(ylabel=f"{unit} that an id stands for", xlabel="%", title="short and long ids")
        lengths.legend()

    words = f"Use of the vocabulary: how often each id occurs, by rank; and how many {unit} the ids stand for."
    return draw_picture("vocabulary_use", words, 3.2, draw)


def size_shares(uses: FloatArray, sizes: FloatArray) -> tuple[list[str], FloatArray, FloatArray]:
    """(bins of sizes, share of all uses, share of all ids), in bins 1, 2, 3-4, 5-8, ... of sizes [V]."""
    bins = np.ceil(np.log2(np.maximum(sizes, 1))).astype(int)
    count = int(bins.max(initial=0)) + 1
    edges = [(2 ** (i - 1) + 1 if i else 1, 2**i) for i in range(count)]
    labels = [str(b) if a == b else f"{a}-{b}" for a, b in edges]
    ids = np.bincount(bins, minlength=count) / max(1, len(bins))
    shares = np.bincount(bins, weights=uses, minlength=count) / max(1, uses.sum())
    return labels, shares, ids


# --- of a dataset -----------------------------------------------------------------------------------------------------


def episode_lengths(edges: FloatArray, counts: FloatArray, fps: float, horizon: int) -> Picture:
    """Histogram of the episodes' lengths in frames, with the length of a chunk."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=BLUE, edgecolor="white", linewidth=0.5)
        axes.axvline(horizon, color=VERMILLION, linestyle="--", label=f"a chunk: {horizon} frames")
        axes.set(xlabel="frames", ylabel="episodes", xlim=(0, None))
        axes.yaxis.set_major_locator(_ticks(whole=True))
        if fps > 0:
            above = axes.secondary_xaxis(
                "top", functions=(lambda x: np.asarray(x) / fps, lambda x: np.asarray(x) * fps)
            )
            above.set_xlabel("seconds")
        figure.legend(loc="outside lower right")

    return draw_picture("episode_lengths", "Lengths of the episodes.", 3.0, draw)


def distributions(
    labels: Sequence[str],
    edges: FloatArray,
    counts: FloatArray,
    marks: Sequence[tuple[float, float]],
    outside: Sequence[int],
) -> Picture:
    """A histogram of each dimension.

    Args:
        labels: of the D dimensions.
        edges, counts: [D, B + 1] and [D, B].
        marks: q01 and q99 of each.
        outside: how many of its values lie outside the edges.
    """
    columns = _columns(len(labels))
    shown = min(len(labels), 4 * MOST_PANELS)
    lines = -(-shown // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(lines, columns, squeeze=False)
        for dim, axes in enumerate(grid.flat):
            if dim >= shown:
                axes.set_visible(False)
                continue
            axes.stairs(counts[dim], edges[dim], fill=True, color=BLUE)
            for mark in marks[dim]:
                axes.axvline(mark, color=VERMILLION, linewidth=1.0, linestyle="--")
            axes.set_title(_labels([labels[dim]], 27)[0], fontsize=8)
            axes.set_yticks([])
            axes.margins(x=0.03)
            axes.tick_params(labelsize=7)
            axes.ticklabel_format(axis="x", useOffset=False)
            axes.xaxis.set_major_locator(_ticks(4))
            if outside[dim]:
                place = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 7}
                frame = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
                axes.text(0.98, 0.95, f"{outside[dim]} further out", color="#444444", bbox=frame, **place)

    left_out = f" The first {shown} of {len(labels)} dimensions." if shown < len(labels) else ""
    words = (
        f"How the values of each dimension are distributed, in data units; dashed: 1st and 99th percentile.{left_out}"
    )
    return draw_picture("distributions", words, 0.4 + 1.05 * lines, draw)


def spreads(
    labels: Sequence[str], quantities: dict[str, FloatArray], still: Sequence[int], rare: Sequence[int]
) -> Picture:
    """Ranges of all dimensions side by side, on a scale where -1 and 1 are the 1st and the 99th percentile.

    Args:
        labels: of the D dimensions.
        quantities: min, q01, q10, q50, q90, q99, max, each [D] on that scale.
        still, rare: dimensions that have no such scale, as they never or hardly move.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rows = _dimension_axis(axes, labels)
        drawn = np.array([row for row in rows.tolist() if row not in {*still, *rare}], dtype=int)
        low, high = quantities["min"][drawn], quantities["max"][drawn]
        axes.axvspan(-1, 1, color="#eef3f7", zorder=0)
        axes.hlines(drawn, low, high, color=GREY, linewidth=1.2, label="min to max")
        axes.plot(low, drawn, "|", color=GREY, markersize=7)
        axes.plot(high, drawn, "|", color=GREY, markersize=7)
        for first, second, width, name in (("q01", "q99", 4, "1 % to 99 %"), ("q10", "q90", 8, "10 % to 90 %")):
            colour = "#9ecae1" if first == "q01" else BLUE
            axes.hlines(
                drawn, quantities[first][drawn], quantities[second][drawn], color=colour, linewidth=width, label=name
            )
        axes.plot(
            quantities["q50"][drawn], drawn, "o", color="white", markeredgecolor="black", markersize=4, label="median"
        )
        for row in still:
            axes.text(0.0, row, "never moves", va="center", ha="center", color=GREY, fontsize=8)
        for row in rare:
            axes.text(0.0, row, "hardly moves, but for a few values", va="center", ha="center", color=GREY, fontsize=8)
        reach = float(np.abs(np.concatenate([low, high, [1.0]])).max())
        if reach > 6:
            axes.set_xscale("symlog", linthresh=2.0)
        axes.set_xlim(-1.08 * max(reach, 1.05), 1.08 * max(reach, 1.05))
        axes.set_xlabel("-1 and 1: 1st and 99th percentile" + ("; logarithmic beyond 2" if reach > 6 else ""))
        figure.legend(loc="outside lower center", ncols=4)

    words = "Ranges of the dimensions, each on its own scale: how far minimum and maximum lie outside the bulk."
    return draw_picture("ranges", words, _list_height(len(labels)) + 0.3, draw)


def modes(names: Sequence[str], clips: Sequence[bool], frames: Sequence[float], largest: Sequence[float]) -> Picture:
    """What each normalisation mode does: share of frames with a value outside [-1, 1], and the largest value."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        rows = np.arange(len(names))
        colours = [ORANGE if clip else GREY for clip in clips]
        left.barh(rows, 100 * np.asarray(frames), color=colours, height=0.6)
        left.set_yticks(rows, names)
        left.invert_yaxis()
        left.set(xlabel="% of frames", title="frames with a value outside [-1, 1]", xlim=(0, 100))
        right.plot(largest, rows, "o", color=BLUE)
        right.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
        _log_axis(right.xaxis, min(1.0, *largest), max(largest))
        right.set(
            xlabel="largest normalised value (logarithmic), before clipping", title="how far the largest is outside"
        )
        from matplotlib.patches import Patch

        handles = [
            Patch(color=ORANGE, label="clipped to [-1, 1]"),
            Patch(color=GREY, label="kept, costs larger coefficients"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)

    return draw_picture("modes", "What each normalisation mode does to the values outside its range.", 2.9, draw)
