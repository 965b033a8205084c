"""What was tried to need fewer tokens still, beside what the package does: other orders, other vocabularies.

Each idea is fitted at several scales and encoded with one rate weight; its tokens are read off where its RMSE is that
of the package's tokenizer (frequency first) at the middle scale, and given relative to it. No idea but the order
changes what a decoder has to do. What does not help here is not in the package.

    python benchmarks/encoder_ideas.py --root DIR [DIR ...] --horizon 16 50 [--rate_weight 0.6]
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.bpe import Merges
from pi0_fast.actions.bpe_training import Corpus
from pi0_fast.actions.dct import dct_matrix
from pi0_fast.actions.rate_distortion import cheapest_rows, path_tables
from pi0_fast.actions.vocabulary import Vocabulary
from rate_distortion import geometric, tokens_at
from tokenizer_speed import recorded

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
SCALES = (8.0, 11.0, 15.0)
VOCAB_SIZE = 1024


def orders(horizon: int, size: int) -> dict[str, LongArray]:
    """Ways to put the coefficients of a chunk one after the other; positions in the order "frequency"."""
    grid = np.arange(horizon * size).reshape(horizon, size)

    def by_dimension(part: LongArray, turning: bool) -> LongArray:
        turned = part.T.copy()
        if turning:  # the zeros of one dimension are then beside those of the next
            turned[1::2] = turned[1::2, ::-1]
        return turned.ravel()

    half = horizon // 2
    return {
        "frequency first": grid.ravel(),
        "dimension first": by_dimension(grid, False),
        "dimension first, every second backwards": by_dimension(grid, True),
        "means first, then by dimension": np.concatenate([grid[0], by_dimension(grid[1:], False)]),
        "means first, then every second backwards": np.concatenate([grid[0], by_dimension(grid[1:], True)]),
        "lower half of the frequencies by dimension, then the upper": np.concatenate(
            [by_dimension(grid[:half], False), by_dimension(grid[half:], False)]
        ),
    }


def fitted_vocabulary(rows: IntArray, size: int) -> Vocabulary:
    """Byte-pair encoding of rows of coefficients, int32 [N, L]."""
    corpus = Corpus(rows.shape[1])
    corpus.append(corpus.pack(rows, (int(rows.min()), int(rows.max()))))
    return Vocabulary.fit(corpus, vocab_size=size)


def pruned(vocabulary: Vocabulary, rows: FloatArray, rate_weight: float, size: int) -> Vocabulary:
    """Without the ids that the cheapest ways use least, down to `size`; of those that no other id is merged from.

    Who used such an id uses its two parts instead. In three rounds, as the uses change.
    """
    for target in np.geomspace(vocabulary.size, size, 4)[1:].round().astype(int).tolist():
        ids = cheapest_rows(path_tables(vocabulary), rows, rate_weight).ids
        uses = np.bincount(ids, minlength=vocabulary.size).astype(float)
        merges = vocabulary.merges
        triples = list(zip(merges.left.tolist(), merges.right.tolist(), merges.result.tolist(), strict=True))
        parts = {result: (left, right) for left, right, result in triples}
        parents = np.bincount(np.concatenate([merges.left, merges.right]), minlength=vocabulary.size)
        heap = [(uses[i], i) for i in parts if not parents[i]]
        heapq.heapify(heap)
        kept = np.ones(vocabulary.size, bool)
        while kept.sum() > target:
            count, i = heapq.heappop(heap)
            if count != uses[i]:  # an entry of before it took over another's uses
                heapq.heappush(heap, (uses[i], i))
                continue
            kept[i] = False
            for part in parts[i]:
                parents[part] -= 1
                uses[part] += uses[i]
                if not parents[part] and part in parts:
                    heapq.heappush(heap, (uses[part], part))
        number = np.cumsum(kept) - 1
        pairs = [(int(number[a]), int(number[b]), int(number[c])) for a, b, c in triples if kept[c]]
        characters = tuple(text for text, keep in zip(vocabulary.characters, kept, strict=True) if keep)
        smaller = Merges.from_pairs(merges.base_size, pairs)
        vocabulary = Vocabulary(vocabulary.symbol_format, vocabulary.min_token, smaller, characters)
    return vocabulary


def one_set(fitted: FloatArray, held_out: FloatArray, weight: float) -> dict[str, float]:
    """Tokens of each idea at the error of the first, relative to it."""
    horizon, size = fitted.shape[1:]
    matrix = dct_matrix(horizon)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for scale in SCALES:
        rows, others = (
            np.einsum("kt,ntd->nkd", matrix, chunks).reshape(len(chunks), -1) * np.float32(scale)
            for chunks in (fitted, held_out)
        )
        for name, order in orders(horizon, size).items():
            own, measured = (np.ascontiguousarray(values[:, order]) for values in (rows, others))
            rounded = np.rint(own).astype(np.int32)
            vocabularies = {name: fitted_vocabulary(rounded, VOCAB_SIZE)}
            if name in ("frequency first", "dimension first"):
                chosen = cheapest_rows(path_tables(vocabularies[name]), own, weight).coefficients
                vocabularies[f"{name}, refitted on what was chosen"] = fitted_vocabulary(chosen, VOCAB_SIZE)
                large = fitted_vocabulary(rounded, 4 * VOCAB_SIZE)
                vocabularies[f"{name}, pruned from four times the ids"] = pruned(large, own, weight, VOCAB_SIZE)
            for kind, vocabulary in vocabularies.items():
                found = cheapest_rows(path_tables(vocabulary), measured, weight)
                error = float(np.sqrt(np.mean(((measured - found.coefficients) / scale) ** 2)))
                points[kind].append((error, float(found.counts.mean())))
    error, tokens = points["frequency first"][1]
    return {kind: tokens_at(error, found) / tokens for kind, found in points.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, nargs="+", required=True)
    parser.add_argument("--horizon", type=int, nargs="+", default=[16, 50])
    parser.add_argument("--rate_weight", type=float, default=0.6)
    parser.add_argument("--values", type=int, default=2_000_000, help="numbers of the chunks to fit on, at most")
    arguments = parser.parse_args()
    table: dict[str, list[float]] = defaultdict(list)
    names = []
    for root in arguments.root:
        for horizon in arguments.horizon:
            _, fitted, held_out = recorded(root, horizon, 1 << 40)
            most = arguments.values // fitted[0].size
            fitted, held_out = (
                values[:: max(1, len(values) // count)] for values, count in ((fitted, most), (held_out, most // 4))
            )
            names.append(f"{root.name} H={horizon}")
            print(f"{names[-1]}: {len(fitted)} chunks to fit, {len(held_out)} held out", flush=True)
            for kind, ratio in one_set(fitted, held_out, arguments.rate_weight).items():
                table[kind].append(ratio)
    print(
        f"\ntokens at equal error, {VOCAB_SIZE} ids, rate weight {arguments.rate_weight:g}; relative to the first line"
    )
    print("| idea | " + " | ".join(names) + " | geometric mean |\n|" + " --- |" * (len(names) + 2))
    for kind, ratios in table.items():
        print(f"| {kind} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + f" | {geometric(ratios):.3f} |")


if __name__ == "__main__":
    main()
