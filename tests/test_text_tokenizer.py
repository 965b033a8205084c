"""Text tokenizers: ids of published formats, the proof that texts may be cut, files, errors, the hub, transformers."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hub_server import Hub, serve
from pi0_fast.text_tokenizer import (
    JsonTextTokenizer,
    SentencePieceTextTokenizer,
    TextTokenizer,
    TinyTextTokenizer,
    load_text_tokenizer,
)
from pi0_fast.types import PolicyError

CUTS = [(":", " "), *((digit, after) for digit in "0123456789" for after in " ;")]
TINY = TinyTextTokenizer()
TEXTS = st.text(st.one_of(st.sampled_from("Tasken: ;|,0123456789-\nAction"), st.characters(exclude_categories=["Cs"])))
SENTENCES = [
    "Task: pick up the cube, State: -1 0 255;\n",
    "Open the drawer, é\t<loc0012> 中文😀  two  spaces\n\n",
    "Action: |",
]


def tiny_files(**changes: Any) -> dict[str, bytes]:
    """The built-in tokenizer's files, with parts of tokenizer.json replaced."""
    files = dict(TINY._files)
    content = {**json.loads(files["tokenizer.json"]), **changes}
    return {**files, "tokenizer.json": json.dumps(content).encode()}


def tiny_model(**changes: Any) -> dict[str, Any]:
    model = json.loads(TINY._files["tokenizer.json"])["model"]
    return {**model, **changes}


def train_sentencepiece(**options: Any) -> bytes:
    """A small sentencepiece model; by default as Gemma's: no space before a text, no space removed."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    gemmas = {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False, "pad_id": 0}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Task: pick up, State: 10 200 31;", "Action: | 45 67 89 to"] * 20),
        model_writer=model,
        vocab_size=100,
        hard_vocab_limit=False,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        minloglevel=2,
        **{**gemmas, **options},
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def paligemma(shared: Path) -> TextTokenizer:
    pytest.importorskip("sentencepiece")
    return load_text_tokenizer(shared / "assets" / "paligemma_tokenizer.model")


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_paligemma_ids(paligemma: TextTokenizer) -> None:
    assert paligemma.vocab_size == 257152
    assert (paligemma.bos_id, paligemma.eos_id, paligemma.pad_id) == (2, 1, 0)
    assert paligemma.encode("Action: ") == [4022, 235292, 235248]
    assert paligemma.encode("|") == [235371]
    assert paligemma.encode("0") == [235276]
    assert paligemma.encode_prompt("\n") == [2, 108]
    assert paligemma.encode("<loc0000><seg000>") == [256000, 257024]
    assert paligemma.piece(256000) == "<loc0000>"


@pytest.mark.golden
def test_a_tokenizer_json_puts_its_own_special_tokens_around_a_prompt(shared: Path) -> None:
    plain = load_text_tokenizer("tokenizers/text_tok_4096", base=shared / "golden" / "lerobot_checkpoint")
    bos = load_text_tokenizer("tokenizers/text_tok_bos_4096", base=shared / "golden" / "lerobot_checkpoint_relative")
    assert plain.vocab_size == bos.vocab_size == 4096
    assert plain.encode("Action: |") == bos.encode("Action: |") == [361, 286, 355, 352]
    assert plain.encode_prompt("Task") == [364]
    assert bos.encode_prompt("Task") == [2, 364]


def test_tiny_ids_by_hand() -> None:
    tiny = TinyTextTokenizer()
    # 4 special tokens, 256 bytes, space, line feed, "!" to "~", then pieces of Action, Task, State.
    assert tiny.encode(" \n!~") == [260, 261, 262, 355]
    assert [tiny.piece(i) for i in tiny.encode("Action: |")] == ["Action", ":", "\u2581", "|"]
    assert [tiny.piece(i) for i in tiny.encode("Task, State")] == ["Task", ",", "\u2581", "State"]
    assert tiny.encode("é\t") == [4 + 0xC3, 4 + 0xA9, 4 + 9]
    assert tiny.encode_prompt("") == [2]
    assert tiny.piece(4095) == "<unused3727>"
    assert tiny.vocab_size == 4096
    assert TinyTextTokenizer(500).vocab_size == 500


@given(TEXTS)
def test_tiny_ids_are_all_below_the_unused_and_bring_the_text_back(text: str) -> None:
    ids = TINY.encode(text)
    assert max(ids, default=0) < 368
    if "\u2581" not in text and not any(token in text for token in ("<pad>", "<eos>", "<bos>", "<unk>")):
        assert TINY._tokenizer.decode(ids) == text


AROUND = [
    None,
    {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<eos>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]},
            "<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]},
        },
    },
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
]


@pytest.mark.parametrize("post_processor", AROUND)
def test_encode_prompt_is_what_tokenizers_gives_with_special_tokens(post_processor: Any) -> None:
    files = tiny_files(post_processor=post_processor)
    tokenizer = JsonTextTokenizer(files, "here")
    reference = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ["", "x", *SENTENCES]:
        assert tokenizer.encode_prompt(text) == reference.encode(text).ids
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_truncation_and_padding_that_the_file_carries_do_not_count() -> None:
    files = tiny_files(
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    )
    tokenizer = JsonTextTokenizer(files, "here")
    assert tokenizer.encode_prompt(SENTENCES[0]) == TinyTextTokenizer().encode_prompt(SENTENCES[0])


# --- cutting texts ------------------------------------------------------------------------------------------------


@given(TEXTS, st.sampled_from(CUTS), TEXTS)
def test_texts_may_be_cut_where_tiny_says_so(before: str, cut: tuple[str, str], after: str) -> None:
    begin, end = before + cut[0], cut[1] + after
    assert TINY.encode(begin + end) == TINY.encode(begin) + TINY.encode(end)


def test_tiny_says_that_texts_may_be_cut() -> None:
    assert TinyTextTokenizer().never_joins(CUTS)
    assert not TinyTextTokenizer().never_joins([("T", "a")])
    assert JsonTextTokenizer(tiny_files(**spaces_as_they_are()), "here").never_joins(CUTS)


@pytest.mark.golden
@settings(max_examples=200)
@given(before=TEXTS, cut=st.sampled_from(CUTS), after=TEXTS)
@example(before="Task: a, State", cut=(":", " "), after="-1 0 255;\n")
def test_texts_may_be_cut_with_paligemma(
    paligemma: TextTokenizer, before: str, cut: tuple[str, str], after: str
) -> None:
    begin, end = before + cut[0], cut[1] + after
    assert paligemma.encode(begin + end) == paligemma.encode(begin) + paligemma.encode(end)


@pytest.mark.golden
def test_paligemma_and_the_goldens_say_that_texts_may_be_cut(shared: Path, paligemma: TextTokenizer) -> None:
    assert paligemma.never_joins(CUTS)
    for name, text in (("lerobot_checkpoint", "text_tok_4096"), ("lerobot_checkpoint_relative", "text_tok_bos_4096")):
        assert load_text_tokenizer(shared / "golden" / name / "tokenizers" / text).never_joins(CUTS)


def joining_model() -> dict[str, Any]:
    """A digit and the space after it as one piece."""
    vocabulary = dict(tiny_model()["vocab"])
    vocabulary["5\u2581"] = vocabulary.pop("<unused0>")
    return tiny_model(vocab=vocabulary, merges=[*tiny_model()["merges"], ["5", "\u2581"]])


def added_token(content: str, **flags: bool) -> dict[str, Any]:
    """The added tokens of the built-in tokenizer and one more, behind the vocabulary."""
    tokens = json.loads(TINY._files["tokenizer.json"])["added_tokens"]
    return {"added_tokens": [*tokens, {**tokens[0], "special": False, "id": 4096, "content": content, **flags}]}


def spaces_as_they_are() -> dict[str, Any]:
    """A vocabulary with the space itself, and nothing that replaces it."""
    vocabulary = {" " if piece == "\u2581" else piece: number for piece, number in tiny_model()["vocab"].items()}
    return {"model": tiny_model(vocab=vocabulary), "normalizer": None}


#: Takes two characters away.
SHORTENING = {**spaces_as_they_are(), "normalizer": {"type": "Replace", "pattern": {"String": ": 1"}, "content": "1"}}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": joining_model()},
        SHORTENING,
        added_token("5 7"),
        added_token("State:", rstrip=True),
        {"model": tiny_model(ignore_merges=True)},
        {"normalizer": None},
        {"normalizer": {"type": "Prepend", "prepend": "\u2581"}},
        {
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        },
    ],
    ids=[
        "joined",
        "shortened",
        "added token",
        "eats spaces",
        "ignore_merges",
        "unknown space",
        "prepends",
        "ByteLevel",
    ],
)
def test_tokenizers_of_which_nothing_is_proved_are_not_cut(changes: dict[str, Any]) -> None:
    assert not JsonTextTokenizer(tiny_files(**changes), "here").never_joins(CUTS)


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"model": joining_model()}, "5", " 7"),
        (SHORTENING, "State:", " 1"),
        (added_token("5 7"), "5", " 7"),
        (added_token("State:", rstrip=True), "State:", " 1"),
    ],
)
def test_those_would_really_be_wrong(changes: dict[str, Any], before: str, after: str) -> None:
    tokenizer = JsonTextTokenizer(tiny_files(**changes), "here")
    assert tokenizer.encode(before + after) != tokenizer.encode(before) + tokenizer.encode(after)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, True), ({"add_dummy_prefix": True}, False), ({"remove_extra_whitespaces": True}, False)],
    ids=["Gemma's way", "space before a text", "spaces removed"],
)
def test_sentencepiece_models_are_cut_only_where_that_is_proved(options: dict[str, Any], expected: bool) -> None:
    tokenizer = SentencePieceTextTokenizer(train_sentencepiece(split_digits=True, **options), "small.model")
    assert tokenizer.never_joins(CUTS) is expected


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["byte", "json", "model"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> TextTokenizer:
    """A tokenizer of each kind."""
    if request.param == "byte":
        return load_text_tokenizer("byte")
    folder = tmp_path / "source"
    folder.mkdir()
    if request.param == "json":
        for name, content in tiny_files(post_processor=None).items():
            (folder / name).write_bytes(content)
    else:
        (folder / "spiece.model").write_bytes(train_sentencepiece())
    return load_text_tokenizer(folder)


def test_what_is_saved_loads_as_the_same(source: TextTokenizer, tmp_path: Path) -> None:
    source.save(tmp_path / "new" / "folder")
    loaded = load_text_tokenizer("folder", base=tmp_path / "new")
    assert loaded.fingerprint == source.fingerprint
    for text in SENTENCES:
        assert loaded.encode_prompt(text) == source.encode_prompt(text)
    loaded.save(tmp_path / "again")
    for file in (tmp_path / "new" / "folder").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_pickled_is_the_same(source: TextTokenizer) -> None:
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint == source.fingerprint
    assert copy.encode_prompt(SENTENCES[0]) == source.encode_prompt(SENTENCES[0])


def test_fingerprints_tell_vocabularies_and_special_tokens_apart() -> None:
    tiny = tiny_files()
    config = {**json.loads(tiny["tokenizer_config.json"]), "pad_token": "<unk>"}
    files = [
        tiny,
        tiny_files(post_processor=None),
        tiny_files(model=joining_model()),
        {**tiny, "tokenizer_config.json": json.dumps(config).encode()},
    ]
    assert len({JsonTextTokenizer(content, "here").fingerprint for content in files}) == 4


def test_relative_names_are_looked_for_beside_the_checkpoint_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyTextTokenizer(500).save(tmp_path / "checkpoint" / "tokenizers" / "text")
    TinyTextTokenizer(600).save(tmp_path / "here" / "tokenizers" / "text")
    monkeypatch.chdir(tmp_path / "here")
    assert load_text_tokenizer("tokenizers/text", base=tmp_path / "checkpoint").vocab_size == 500
    assert load_text_tokenizer("tokenizers/text").vocab_size == 600
    assert load_text_tokenizer(tmp_path / "here" / "tokenizers" / "text" / "tokenizer.json").vocab_size == 600


def test_special_tokens_by_the_names_that_the_files_give() -> None:
    files = tiny_files()
    config = json.loads(files["tokenizer_config.json"])
    config.pop("eos_token")
    config["bos_token"] = {"__type": "AddedToken", "content": "State"}
    mapped = {**files, "tokenizer_config.json": json.dumps(config).encode()}
    mapped["special_tokens_map.json"] = json.dumps({"eos_token": {"content": "Task"}}).encode()
    tokenizer = JsonTextTokenizer(mapped, "here")
    assert [tokenizer.piece(i) for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)] == [
        "State",
        "Task",
        "<pad>",
    ]
    del files["tokenizer_config.json"]
    assert JsonTextTokenizer(files, "here").bos_id == 2


def test_a_model_file_follows_the_config_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece())
    assert load_text_tokenizer(tmp_path).encode_prompt("") == [2]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert load_text_tokenizer(tmp_path).encode_prompt("") == [1]


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.json": b""}, ["tokenizer.json", "cannot be read"]),
        ({"tokenizer.json": b"\xff\xfe"}, ["tokenizer.json", "cannot be read"]),
        ({**tiny_files(), "tokenizer_config.json": b"{"}, ["tokenizer_config.json", "no JSON"]),
        ({**tiny_files(), "tokenizer_config.json": b"[]"}, ["tokenizer_config.json", "object", "list"]),
        (
            {**tiny_files(), "tokenizer_config.json": b'{"pad_token": "[PAD]"}'},
            ["pad_token", "[PAD]", "tokenizer_config"],
        ),
        (
            {**tiny_files(), "tokenizer_config.json": b'{"added_tokens_decoder": {"4096": {"content": "<image>"}}}'},
            ["<image>", "4096", "tokenizer_config.json"],
        ),
        ({**tiny_files(), "added_tokens.json": b'{"<bos>": 7}'}, ["<bos>", "7", "added_tokens.json"]),
        ({"tokenizer.model": b""}, ["tokenizer.model", "empty"]),
        ({"tokenizer.model": b"version https://git-lfs"}, ["tokenizer.model"]),
        ({"a.model": b"a", "b.model": b"b"}, ["2 files *.model"]),
        ({"model.safetensors": b""}, ["no tokenizer.json", "no *.model"]),
    ],
)
def test_directories_that_cannot_be_used(files: dict[str, bytes], words: list[str], tmp_path: Path) -> None:
    if "tokenizer.model" in files:
        pytest.importorskip("sentencepiece")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        load_text_tokenizer(tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["", "nothing", "./a/b", "a/b/c", "/nowhere/tokenizer.json", "x/tokenizer.model"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(PolicyError, match="directory"):
        load_text_tokenizer(name)


def test_ids_that_do_not_exist(source: TextTokenizer) -> None:
    for wrong in (-1, source.vocab_size):
        with pytest.raises(PolicyError, match=f"no id {wrong}"):
            source.piece(wrong)


@pytest.mark.parametrize("size", [0, 367, 4096.0, True])
def test_a_tiny_vocabulary_must_hold_its_characters(size: Any) -> None:
    with pytest.raises(PolicyError, match="from 368"):
        TinyTextTokenizer(size)


def test_a_model_file_without_sentencepiece_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(PolicyError, match=r"pip install 'pi0-fast\[policy\]'"):
        load_text_tokenizer(tmp_path)


def test_a_sentencepiece_model_without_pad_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"small\.model has no pad_token;"):
        SentencePieceTextTokenizer(train_sentencepiece(pad_id=-1), "small.model")


# --- the hub and transformers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as running:
        yield running


LOADING = """
import json, sys
from pi0_fast.text_tokenizer import load_text_tokenizer
from pi0_fast.types import Pi0FastError
for arguments in json.loads(sys.argv[1]):
    try:
        print(json.dumps(load_text_tokenizer(arguments.pop("name"), **arguments).fingerprint))
    except Pi0FastError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def test_only_the_tokenizers_files_come_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    tiny = TinyTextTokenizer()
    repository = hub.add("google/small", files={**tiny._files, "model-00001.safetensors": b"w" * 1000})
    first = repository.branches["main"]
    repository.commit(tiny_files(post_processor=None), "other")
    hub.add("google/gated", files=dict(tiny._files), gated=True)
    requests = [
        {"name": "google/small", "revision": first},
        {"name": "google/small"},
        {"name": "google/gated"},
        {"name": "google/absent", "local_files_only": True},
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOADING, json.dumps(requests)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    pinned, newest, gated, absent = (json.loads(line) for line in done.stdout.splitlines())
    assert pinned == tiny.fingerprint
    assert newest == JsonTextTokenizer(tiny_files(post_processor=None), "here").fingerprint
    assert gated[0] == absent[0] == "HubError"
    assert "google/gated" in gated[1]
    assert "accept its conditions" in gated[1]
    assert "text_tokenizer_name" in gated[1]
    assert "local_files_only" in absent[1]
    assert hub.asked("tokenizer.json")
    assert not hub.asked("safetensors")


IN_TRANSFORMERS = """
import json, sys
from transformers import AutoTokenizer
for folder, texts in json.loads(sys.argv[1]):
    prompts = AutoTokenizer.from_pretrained(folder)
    actions = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, add_eos_token=True, add_bos_token=False)
    padded = prompts(texts, max_length=200, truncation=True, padding="max_length", padding_side="right")
    print(json.dumps([
        [ids[: sum(mask)] for ids, mask in zip(padded["input_ids"], padded["attention_mask"])],
        actions.encode("Action: ", add_special_tokens=False), actions.encode("|"),
        [actions.bos_token_id, actions.vocab_size, actions.convert_tokens_to_ids("|")],
        actions.convert_ids_to_tokens(actions.encode("Action: ", add_special_tokens=False)),
    ]))
"""


def test_what_is_saved_gives_lerobot_the_same_ids(shared: Path, tmp_path: Path) -> None:
    """As lerobot 0.6.1 loads and calls it, `Action` and `:` included, which it looks for by name."""
    python = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not python:
        pytest.skip("PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1")
    names = ["byte", "golden/lerobot_checkpoint_relative/tokenizers/text_tok_bos_4096"]
    names.append("assets/paligemma_tokenizer.model")
    tokenizers = [load_text_tokenizer(name, base=shared) for name in names]
    jobs = []
    for number, tokenizer in enumerate(tokenizers):
        tokenizer.save(tmp_path / str(number))
        jobs.append((str(tmp_path / str(number)), SENTENCES))
    done = subprocess.run(
        [python, "-c", IN_TRANSFORMERS, json.dumps(jobs)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for tokenizer, line in zip(tokenizers, done.stdout.splitlines(), strict=True):
        prompts, prefix, end, numbers, pieces = json.loads(line)
        assert prompts == [tokenizer.encode_prompt(text) for text in SENTENCES]
        assert prefix == tokenizer.encode("Action: ")
        assert end == [*tokenizer.encode("|"), tokenizer.eos_id]
        assert numbers == [tokenizer.bos_id, tokenizer.vocab_size, end[0]]
        assert pieces[:2] == ["Action", ":"]
