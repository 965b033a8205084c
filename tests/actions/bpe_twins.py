"""Slow, obvious byte-pair encoding and its training, and the same by Hugging Face's `tokenizers`: for comparison."""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from tokenizers import Tokenizer, models, trainers

Triple = tuple[int, int, int]  # left, right, result
LETTERS = "abcdefghijklmnop"


def encode(pairs: Sequence[Triple], row: Sequence[int]) -> list[int]:
    """Merge the pair of the lowest rank, the leftmost first, until none is left; -1 is a barrier, and dropped."""
    ranks = {(left, right): rank for rank, (left, right, _) in enumerate(pairs)}
    tokens = list(row)
    while True:
        sites = [(ranks[pair], i) for i, pair in enumerate(pairwise(tokens)) if pair in ranks]
        if not sites:
            return [token for token in tokens if token >= 0]
        rank, i = min(sites)
        tokens[i : i + 2] = [pairs[rank][2]]


def strings_of(base: Sequence[str], pairs: Sequence[Triple]) -> list[str]:
    """What each id stands for, when ids of merges are numbered by first use."""
    strings = list(base)
    for left, right, result in pairs:
        if result == len(strings):
            strings.append(strings[left] + strings[right])
    return strings


def peer_of(base: Sequence[str], pairs: Sequence[Triple]) -> Tokenizer:
    """`tokenizers` with these merges, without pre-tokenisation."""
    strings = strings_of(base, pairs)
    vocab = {text: i for i, text in enumerate(strings)}
    return Tokenizer(models.BPE(vocab=vocab, merges=[(strings[left], strings[right]) for left, right, _ in pairs]))


def words_of(row: Sequence[int], base: Sequence[str] = LETTERS) -> list[str]:
    """The row as strings, cut at its barriers."""
    return [word for word in "".join(" " if i < 0 else base[i] for i in row).split(" ") if word]


def train(rows: Sequence[Sequence[int]], base_size: int, vocab_size: int) -> tuple[list[Triple], bool]:
    """The BpeTrainer of `tokenizers`, min_frequency 2, symbol by symbol.

    Returns the merges, and whether `tokenizers` could have chosen otherwise: its queue may hold one pair twice with
    equal counts but for different rows (when two merges give one string), and which comes first is up to its heap.
    """
    words = [list(row) for row in rows]
    counts: Counter[tuple[int, int]] = Counter()
    where: dict[tuple[int, int], set[int]] = defaultdict(set)
    for w, word in enumerate(words):
        for pair in pairwise(word):
            if -1 not in pair:
                counts[pair] += 1
                where[pair].add(w)
    queue = [(-counts[pair], pair, n, sorted(rows)) for n, (pair, rows) in enumerate(sorted(where.items()))]
    heapq.heapify(queue)
    number = len(queue)
    expansions: list[tuple[int, ...]] = [(i,) for i in range(base_size)]
    merges: dict[tuple[int, int], int] = {}
    open_choice = False
    while len(expansions) < vocab_size and queue:
        stored, pair, n, members = heapq.heappop(queue)
        if -stored != counts[pair]:
            heapq.heappush(queue, (-counts[pair], pair, n, members))
            continue
        if -stored < 2:
            break
        open_choice |= any(entry[:2] == (stored, pair) for entry in queue)
        expansion = expansions[pair[0]] + expansions[pair[1]]
        if expansion not in expansions:
            expansions.append(expansion)
        new = expansions.index(expansion)
        merges.pop(pair, None)
        merges[pair] = new
        won: dict[tuple[int, int], set[int]] = defaultdict(set)
        for w in members:
            for changed, change in _merge(words[w], pair, new):
                counts[changed] += change
                if change > 0:
                    won[changed].add(w)
        for changed, of in sorted(won.items()):
            if counts[changed] > 0:
                heapq.heappush(queue, (-counts[changed], changed, number, sorted(of)))
                number += 1
    return [(left, right, new) for (left, right), new in merges.items()], open_choice


def _merge(word: list[int], pair: tuple[int, int], new: int) -> list[tuple[tuple[int, int], int]]:
    """Replace the pair in the word from left to right; returns what pair counts change by."""
    changes: list[tuple[tuple[int, int], int]] = []
    i = 0
    while i + 1 < len(word):
        if (word[i], word[i + 1]) == pair:
            if i > 0 and word[i - 1] >= 0:
                changes += [((word[i - 1], pair[0]), -1), ((word[i - 1], new), 1)]
            word[i : i + 2] = [new]
            if i + 1 < len(word) and word[i + 1] >= 0:
                changes += [((pair[1], word[i + 1]), -1), ((new, word[i + 1]), 1)]
        i += 1
    return changes


def peer_train(words: Sequence[str], base: Sequence[str], vocab_size: int) -> tuple[list[Triple], list[str]]:
    """Merges by rank, and the string of every id, as `tokenizers` trains them."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=list(base),
        special_tokens=[],
        show_progress=False,
        max_token_length=10_000,
    )
    tokenizer.train_from_iterator(words, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    pairs = [(vocab[left], vocab[right], vocab[left + right]) for left, right in model["merges"]]
    return pairs, sorted(vocab, key=lambda text: vocab[text])
