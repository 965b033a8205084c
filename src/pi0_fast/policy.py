"""PI0FastPolicy: images, a task and a state to a chunk of actions; the composition of everything else.

A policy takes batches as LeRobot's datasets and simulators make them, and gives actions in the robot's units: what
LeRobot does in pre- and post-processors around its policy is part of this one, and of its checkpoints. What is not
here: the steps themselves (preparation.py, model/, decode.py) and the files (checkpoint.py).
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pi0_fast.actions.grammar import Grammar
from pi0_fast.actions.model_card import MODEL_CARD
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.checkpoint import (
    DTYPES,
    OWN_FILES,
    SIGNATURE_FILES,
    Checkpoint,
    find_checkpoint,
    read_checkpoint,
    with_tokenizers,
    write_checkpoint,
    write_files,
)
from pi0_fast.counters import noticed
from pi0_fast.decode import ConstrainedChoice, FreeChoice, Generation, generate
from pi0_fast.hub import PushTarget, check_push, is_on_hub, push_files
from pi0_fast.model import weights
from pi0_fast.model.architecture import Architecture
from pi0_fast.model.loss import target_cross_entropy
from pi0_fast.model.masks import attention_mask, sequence_layout
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.policy_card import Training, names_on_hub, policy_card
from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.preparation import Preparation, Prepared
from pi0_fast.processors import FeatureStatistics, PolicyProcessors
from pi0_fast.text_tokenizer import TextTokenizer
from pi0_fast.types import PolicyError, TokenizerError

logger = logging.getLogger(__name__)
#: Target positions that `score` scores over the whole vocabulary at a time.
_SCORED_AT_ONCE = 64


@dataclass(frozen=True)
class ChunkInfo:
    """How a batch of chunks came about.

    Attributes:
        token_ids: int64 [B, T], action tokens; -1 after a row's end.
        lengths: int64 [B], action tokens of each row.
        log_probabilities: float32 [B, S], of each generated token; see `decode.Generation`.
        steps: S, tokens that were generated for the longest row.
        valid: bool [B]; False for a row that held no chunk, which only happens with ``constrained=False``.
        problems: for each row what was wrong, or None.
    """

    token_ids: Tensor
    lengths: Tensor
    log_probabilities: Tensor
    steps: int
    valid: Tensor
    problems: tuple[str | None, ...]


@dataclass(frozen=True)
class TargetScores:
    """N target ids, each predicted from those before it, on the CPU.

    Attributes:
        log_probabilities: float32 [N], of the target id.
        hits: bool [N], whether no other id is likelier.
        is_action: bool [N]; False for ``Action: ``, the end mark and the like.
        weights: float32 [N], as in `prompt.PromptBatch`; 0 for a row that only fills a batch up.
    """

    log_probabilities: Tensor
    hits: Tensor
    is_action: Tensor
    weights: Tensor


class PI0FastPolicy(nn.Module):
    """The pi0-FAST policy (Pertsch et al. 2025, arXiv 2501.09747) on PaliGemma.

    Attributes:
        config: all settings.
        model: the weights; its `device` is the policy's.
        preparation: what happens around the model; for use in a data loader's workers.
        counts: of everything that was changed or left out, by name, since the policy was made: ``rows``,
            ``state_below`` and ``state_above`` (values outside the state's range), ``missing <camera>`` (rows; not of
            those that the configuration declares empty), ``unused <camera>`` (rows; one that the policy does not
            know), ``malformed`` (rows that held no chunk), ``assume_contiguous_prefix`` (rows; see `PI0FastConfig`),
            and in training ``over_budget`` (rows), ``clipped_values``, ``saturated_coefficients``, ``padded_rows``. The
            first of each kind is also logged, but for ``padded_rows``: every episode ends.
    """

    def __init__(
        self,
        config: PI0FastConfig,
        model: PaliGemma,
        processors: PolicyProcessors,
        text_tokenizer: TextTokenizer,
        action_tokenizer: FastTokenizer,
    ) -> None:
        """Join the parts; `from_pretrained` and `create` are the usual ways.

        Raises:
            PolicyError: the parts do not belong together, or ``max_decoding_steps`` cannot hold a chunk.
        """
        super().__init__()
        size = model.architecture.vision.image_size
        if config.image_keys and config.image_resolution != (size, size):
            raise PolicyError(
                f"image_resolution is {config.image_resolution}, but the model's vision tower takes {size} x {size}"
            )
        ids = model.architecture.text.vocab_size
        if text_tokenizer.vocab_size > ids:
            raise PolicyError(
                f"the text tokenizer has {text_tokenizer.vocab_size} ids, the model {ids}: they do not belong together"
            )
        self.model = model
        self.config = config
        self.preparation = Preparation(config, processors, text_tokenizer, action_tokenizer)
        # As bound to the policy's chunks: with another shape in its files, lerobot could not train on them.
        self._parts = (processors, text_tokenizer, self.preparation.action_tokenizer)
        self.counts: Counter[str] = Counter()
        self._choice = self._constrained_choice() if config.constrained else FreeChoice(self.preparation.prompt.end_id)
        self._queue: deque[Tensor] = deque()
        model.gradient_checkpointing = config.gradient_checkpointing
        if config.compile_model:
            model.compile(config.compile_mode)

    def _constrained_choice(self) -> ConstrainedChoice:
        """What may be generated, within `max_decoding_steps` less ``Action: `` and the end mark, as lerobot counts."""
        prompt, tokenizer = self.preparation.prompt, self.preparation.action_tokenizer
        beside = len(prompt.action_prefix_ids) + 1
        length = self.config.chunk_size * self.preparation.processors.action.size
        budget = min(self.config.max_decoding_steps - beside, 4 * length)  # no sequence is longer
        try:
            if budget < 1:
                raise TokenizerError("no chunk takes fewer than one")
            grammar = Grammar(tokenizer.vocabulary, length, max_tokens=budget)
        except TokenizerError as error:
            raise PolicyError(
                f"max_decoding_steps={self.config.max_decoding_steps} leaves {budget} action tokens (Action: and the "
                f"end mark take {beside}): {error}"
            ) from error
        return ConstrainedChoice(grammar, prompt.action_text_ids)

    # --- load and save ----------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        config: PI0FastConfig,
        statistics: Mapping[str, FeatureStatistics],
        *,
        architecture: Architecture | Mapping[str, Any] | str | Path | None = None,
        text_tokenizer: TextTokenizer | None = None,
        action_tokenizer: FastTokenizer | None = None,
        rename_map: Mapping[str, str] | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> PI0FastPolicy:
        """A new policy with random weights, to be trained from nothing; in training mode.

        Args:
            config: declares the features; normalisation is QUANTILES unless it says otherwise.
            statistics: of ``observation.state`` and ``action``, as LeRobot's stats.json has them; where an action
                tokenizer with a normaliser is given, that is what ``action`` is normalised with.
            architecture: sizes; None takes those of ``config.paligemma_variant``, which are billions of parameters.
            text_tokenizer, action_tokenizer: None loads those that the configuration names.
            rename_map: a batch's name of an input -> the policy's.
            seed: of the weights.
            device: None takes ``config.device``, or the CPU.

        Raises:
            PolicyError: parts that do not belong together, statistics are missing, or no such device.
            TokenizerError, HubError: the action tokenizer that the configuration names cannot be loaded.
        """
        config, text_tokenizer, action_tokenizer = with_tokenizers(config, text_tokenizer, action_tokenizer)
        if action_tokenizer.normalizer is not None:
            statistics = {**statistics, config.action_key: action_tokenizer.normalizer}
        processors = PolicyProcessors.from_statistics(config, statistics, rename_map)
        sizes = _as_architecture(architecture)
        if sizes is None:
            sizes = Architecture.variant(config.paligemma_variant, text_tokenizer.vocab_size)
        model = weights.initialize(sizes, DTYPES[config.dtype], seed, device=_device(device, config))
        return cls(config, model, processors, text_tokenizer, action_tokenizer).train()

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        strict: bool = True,
        architecture: Architecture | Mapping[str, Any] | str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        rename_map: Mapping[str, str] | None = None,
        statistics: Mapping[str, FeatureStatistics] | None = None,
        text_tokenizer: TextTokenizer | None = None,
        action_tokenizer: FastTokenizer | None = None,
        robot: str | None = None,
    ) -> PI0FastPolicy:
        """Load a checkpoint that this class or LeRobot wrote, from a directory or from the Hugging Face hub.

        Args:
            path_or_hub_id: a directory (then the network is not touched, unless it names tokenizers that it does not
                hold), or ``owner/name``.
            revision, token, cache_dir, local_files_only: as in huggingface_hub; for all files of the checkpoint. Of
                these, tokenizers that it names elsewhere get all but `revision`.
            device: None takes the checkpoint's own where it is there, else the CPU (logged).
            dtype: ``"float32"``, ``"bfloat16"`` or the torch dtype; None takes the checkpoint's.
            strict: every weight is there and used; see `model.weights.load`.
            architecture: sizes of the model where the checkpoint does not say them and they are not those of its
                ``paligemma_variant``: a dictionary, the path of a JSON file, or an `Architecture`.
            overrides: settings in place of the checkpoint's, such as ``{"n_action_steps": 10}``.
            rename_map: in place of the checkpoint's; a batch's name of an input -> the policy's.
            statistics: in place of the checkpoint's, for training on other data.
            text_tokenizer, action_tokenizer: in place of the checkpoint's, for training with others.
            robot: of a policy that was trained on several datasets, the one whose names, units and action tokens are
                wanted; None for the first.

        Returns:
            The policy in evaluation mode.

        Raises:
            PolicyError: files are missing, damaged, contradict each other or do not belong to the weights; settings or
                a device that do not exist. All of it is named.
            TokenizerError: the same of the action tokenizer.
            HubError: no such repository, access refused, offline.
        """
        hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        folder = find_checkpoint(path_or_hub_id, revision=revision, **hub)
        overrides = dict(overrides or {})
        if dtype is not None:
            overrides["dtype"] = str(dtype).removeprefix("torch.")
        if device is not None:
            overrides["device"] = str(device)
        device = overrides.get("device")
        checkpoint = read_checkpoint(
            folder,
            overrides=overrides,
            device=partial(_device, device),
            strict=strict,
            architecture=_as_architecture(architecture),
            statistics=statistics,
            text_tokenizer=text_tokenizer,
            action_tokenizer=action_tokenizer,
            robot=robot,
            **hub,
        )
        config, processors = checkpoint.config, checkpoint.processors
        if rename_map is not None:
            processors = processors.with_rename_map(rename_map, config)
        parts = (checkpoint.text_tokenizer, checkpoint.action_tokenizer)
        return cls(config, checkpoint.model, processors, *parts).eval()

    def checkpoint(self) -> Checkpoint:
        """The parts, as they are saved."""
        return Checkpoint(self.config, self.model, *self._parts)

    def save_pretrained(self, directory: str | Path, *, max_shard_bytes: int | None = None) -> None:
        """Write a checkpoint directory that loads here and in LeRobot 0.6.1.

        All at once or not at all; other files in an existing directory stay. LeRobot finds tokenizers that are in the
        directory only when it is run from there (it takes their names relative to the working directory).

        Args:
            directory: made if missing.
            max_shard_bytes: see `model.weights.save`; LeRobot reads a single file only, which None writes.

        Raises:
            OSError: it cannot be written; what was there before is unharmed.
        """
        write_checkpoint(Path(directory), self.checkpoint(), max_shard_bytes=max_shard_bytes)

    @staticmethod
    def check_push_to_hub(
        repo_id: str, *, private: bool = False, token: str | bool | None = None, revision: str | None = None
    ) -> PushTarget:
        """Find out before training whether `push_to_hub` would succeed after it; see `hub.check_push`.

        Raises:
            HubError: it would not, or the hub cannot be asked.
        """
        return check_push(
            repo_id,
            own_files=OWN_FILES,
            signature_files=SIGNATURE_FILES,
            private=private,
            token=token,
            revision=revision,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload pi0-FAST policy",
        others: Mapping[str, Checkpoint] | None = None,
        name: str = "",
        training: Training | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes and a model card (README.md, replaced) to the hub, in one commit.

        Args:
            repo_id: ``owner/name``, or ``name`` for the token's own user; created when missing.
            private: make a new repository private; an existing public one is refused then.
            token: None: the one of `hf auth login`, or HF_TOKEN.
            revision: branch to push to, made when missing; None: the main branch.
            commit_message: first line of the commit.
            others, name: of a policy of several datasets, as in `checkpoint.write_files`.
            training: for the card, what is known of how the policy was trained.

        Returns:
            The address of the commit.

        Raises:
            HubError: no token, one that may not write there, a repository of something else, or the hub failed.
        """
        target = self.check_push_to_hub(repo_id, private=private, token=token, revision=revision)
        with tempfile.TemporaryDirectory() as temporary:
            folder, training = Path(temporary), training or Training()
            write_files(folder, self.checkpoint(), others=others, name=name)
            known = names_on_hub(self.config, training, partial(is_on_hub, token=token))
            parts = {name: self.checkpoint(), **(others or {})}
            card = policy_card(target.repo_id, parts, training, known)
            (folder / MODEL_CARD).write_text(card, encoding="utf-8")
            return push_files(
                folder,
                target,
                own_files=OWN_FILES,
                signature_files=SIGNATURE_FILES,
                token=token,
                revision=revision,
                commit_message=commit_message,
            )

    # --- training ---------------------------------------------------------------------------------------------------

    def forward(self, batch: Mapping[str, Any] | Prepared) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a batch.

        Args:
            batch: as for `predict_action_chunk`, with ``action`` [B, chunk_size, D] in the robot's units (and
                ``action_is_pad`` bool [B, chunk_size], where it is known: rows with a padded step get no loss); or
                what ``preparation.training`` made of it.

        Returns:
            The mean cross entropy of the target ids (float32 scalar), and a dictionary: ``loss`` (the same, detached),
            ``target_ids`` (how many), and the counts of this batch. Where the batch was joined from D datasets, also
            ``dataset_losses``, float32 [D, 2]: what each adds to the loss, and the weight that it has there.

        Raises:
            PolicyError: as in `predict_action_chunk`; actions of another shape.
        """
        prepared, hidden, labels = self._targets(batch)
        prompt = prepared.prompt
        (share,) = self._tensors(prompt.weight[prompt.label])
        each = None if prepared.dataset_of_row is None else torch.empty_like(share)
        loss = target_cross_entropy(hidden, self.model.lm_head.weight, labels, share, each)
        info = {"loss": loss.detach(), "target_ids": len(labels), **prepared.counts}
        if each is not None and prepared.dataset_of_row is not None:
            (numbers,) = self._tensors(prepared.dataset_of_row[np.nonzero(prompt.label)[0]])
            sums = torch.zeros(prepared.datasets, 2, device=share.device)
            info["dataset_losses"] = sums.index_add_(0, numbers, torch.stack((each * share, share), dim=1))
        return loss, info

    @torch.no_grad()
    def score(self, batch: Mapping[str, Any] | Prepared) -> TargetScores:
        """How likely each target id is where those before it are given; `batch` and errors as in `forward`.

        Scores are computed for a few positions at a time, so that memory stays small.
        """
        prepared, hidden, labels = self._targets(batch)
        log_probabilities, hits = [], []
        for part in range(0, len(labels), _SCORED_AT_ONCE):
            wanted = labels[part : part + _SCORED_AT_ONCE]
            scores = self.model.logits(hidden[part : part + _SCORED_AT_ONCE])
            hits.append(scores.argmax(dim=-1) == wanted)
            log_probabilities.append(-functional.cross_entropy(scores, wanted, reduction="none"))
        prompt = prepared.prompt
        weights = torch.from_numpy(prompt.weight[prompt.label])
        is_action = torch.isin(labels.cpu(), torch.tensor(self.preparation.prompt.action_text_ids, device="cpu"))
        return TargetScores(torch.cat(log_probabilities).cpu(), torch.cat(hits).cpu(), is_action, weights)

    def _targets(self, batch: Mapping[str, Any] | Prepared) -> tuple[Prepared, Tensor, Tensor]:
        """What `training` made of a batch; the N positions that predict, [N, width]; the ids they are to, int64 [N]."""
        prepared = batch if isinstance(batch, Prepared) else self.preparation.training(batch, self.model.device)
        if not prepared.prompt.label.any():
            raise PolicyError("this was prepared for generation; forward needs what preparation.training makes")
        self._count(prepared.counts)
        prompt = prepared.prompt
        ids, valid, causal = self._tensors(prompt.ids, prompt.valid, prompt.causal)
        features, seen = self._image_features(prepared)
        embeddings = self.model.embed(ids)
        if features is not None:
            embeddings = torch.cat((features, embeddings), dim=1)
        valid, causal, positions = sequence_layout(
            seen, valid, causal, count_padding=self.config.count_padding_in_positions
        )
        counts = prompt.label.sum(axis=1)
        within = np.arange(int(counts.max())) < counts[:, None]
        # The position before each label predicts it; a row with fewer repeats its last one, which is then left out.
        places = prompt.label.argmax(axis=1)[:, None] + np.minimum(np.arange(within.shape[1]), counts[:, None] - 1)
        wanted, chosen = self._tensors(places + seen.shape[1] - 1, within)
        hidden = self.model.hidden_states(embeddings, attention_mask(valid, causal), positions, wanted)[chosen]
        (labels,) = self._tensors(prompt.ids[prompt.label])
        return prepared, hidden, labels

    # --- inference --------------------------------------------------------------------------------------------------

    def predict_action_chunk(
        self,
        batch: Mapping[str, Any] | Prepared,
        *,
        return_info: bool = False,
        temperature: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Chunks of actions for a batch of observations.

        Args:
            batch: ``observation.state`` [B, Ds] or [Ds]; the images that the policy expects, [B, 3, h, w] or
                [B, h, w, 3] (or without B), float in [0, 1] or uint8; ``task``, a text or B texts. numpy or torch, in
                the robot's units. Or what ``preparation.generation`` made of it.
            return_info: also return a `ChunkInfo`.
            temperature: in place of the configuration's; 0 is greedy.
            generator: of the draws, on the model's device.

        torch.autocast around the call changes nothing: the format is that of the weights.

        Returns:
            float32 [B, chunk_size, D] on the CPU, in the robot's units; and the info if asked for. With
            ``constrained=False`` a row may hold no chunk: it is decoded as LeRobot does (missing coefficients are 0,
            surplus ones left out), marked in the info, counted and logged.

        Raises:
            PolicyError: something is missing, of another shape, not finite, or the prompt is too long (all named).
        """
        prepared = batch if isinstance(batch, Prepared) else self.preparation.generation(batch, self.model.device)
        if prepared.prompt.label.any():
            raise PolicyError("this was prepared for training; needed is what preparation.generation makes")
        self._count(prepared.counts)
        prompt, config = prepared.prompt, self.config
        # Without a masked camera nothing comes of it but work.
        imitated = config.assume_contiguous_prefix and not prepared.camera_valid.all()
        empty = config.max_decoding_steps if imitated else None
        ids, valid, causal = self._tensors(prompt.ids, prompt.valid, prompt.causal)
        # Generation has the format of the weights: with torch.autocast, cache and steps would have two.
        with torch.autocast(self.model.device.type, enabled=False):
            with torch.inference_mode():
                features, seen = self._image_features(prepared)
            made = generate(
                self.model,
                features,
                None if features is None else seen,
                ids,
                valid,
                causal,
                choice=self._choice,
                temperature=config.temperature if temperature is None else temperature,
                max_steps=None if config.constrained else config.max_decoding_steps,
                use_cache=config.use_kv_cache,
                position_gap=config.position_gap,
                assume_contiguous_prefix=empty,
                generator=generator,
                log_probabilities=return_info,
            )
        return self._chunks(made, prepared, return_info)

    def _chunks(self, made: Generation, prepared: Prepared, return_info: bool) -> Any:
        """Generated ids to actions."""
        ids, lengths = made.ids.cpu().numpy(), made.lengths.cpu().numpy()
        problems: list[str | None] = [None] * len(ids)
        if not self.config.constrained:
            rows = self.preparation.prompt.parse(ids, lengths, require_prefix=self.config.validate_action_token_prefix)
            problems = [row.problem for row in rows]
            lengths = np.array([len(row.ids) for row in rows])
            ids = np.full((len(rows), max(int(lengths.max()), 1)), -1)
            for kept, row in zip(ids, rows, strict=True):
                kept[: len(row.ids)] = row.ids
        on_error = "raise" if self.config.constrained else "pad"
        actions, info = self.preparation.actions((ids, lengths), prepared.states, on_error=on_error)
        problems = [first or second for first, second in zip(problems, info.problems, strict=True)]
        malformed = [row for row, problem in enumerate(problems) if problem is not None]
        if malformed:
            self._count(Counter(malformed=len(malformed)), f"row {malformed[0]}: {problems[malformed[0]]}")
        chunk = torch.from_numpy(actions)
        if not return_info:
            return chunk
        valid = torch.tensor([problem is None for problem in problems])
        tokens = (torch.from_numpy(ids), torch.from_numpy(lengths))
        shares = made.log_probabilities
        assert shares is not None  # generate was asked for them
        return chunk, ChunkInfo(*tokens, shares.cpu(), made.steps, valid, tuple(problems))

    def select_action(self, batch: Mapping[str, Any]) -> Tensor:
        """The next action of each row, float32 [B, D], in the robot's units.

        The first `n_action_steps` of a chunk are given one after the other; then the next chunk is predicted from the
        batch of that moment. `reset` forgets what is left, as at the beginning of an episode.

        Raises:
            PolicyError: as in `predict_action_chunk`; another number of rows than the chunk under way has.
        """
        if not self._queue:
            chunk = self.predict_action_chunk(batch)
            self._queue.extend(chunk[:, : self.config.n_action_steps].transpose(0, 1))
            return self._queue.popleft()
        state = self.preparation.processors.rename(batch).get(self.config.state_key)
        count = None if state is None else len(state) if np.ndim(state) > 1 else 1
        if count not in (None, len(self._queue[0])):
            raise PolicyError(
                f"a batch of {count} rows, but the chunk under way has {len(self._queue[0])}: call reset() where other "
                "episodes begin"
            )
        return self._queue.popleft()

    def reset(self) -> None:
        """Forget the actions that are left of the last chunk."""
        self._queue.clear()

    # --- parts of both ----------------------------------------------------------------------------------------------

    def _image_features(self, prepared: Prepared) -> tuple[Tensor | None, Tensor]:
        """Vectors [B, I, width] of all cameras one after the other, and which are seen, bool [B, I]."""
        images, rows = prepared.images, len(prepared.states)
        if images is None:
            return None, torch.zeros(rows, 0, dtype=torch.bool, device=self.model.device)
        if prepared.camera_valid.ndim == 2:
            return self._joined_features(images, prepared.camera_valid)
        images = images.to(self.model.device)
        vectors = self.model.encode_images(images.flatten(0, 1))
        features = vectors.reshape(rows, -1, vectors.shape[-1])
        (seen,) = self._tensors(np.repeat(prepared.camera_valid, vectors.shape[1]))
        return features, seen.expand(rows, -1)

    def _joined_features(self, images: Tensor, camera_valid: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        """The same for rows of several datasets; the cameras that a row lacks, bool [B, C], are not encoded."""
        (rows, cameras), wanted = camera_valid.shape, torch.from_numpy(camera_valid.reshape(-1))
        vectors = self.model.encode_images(images.flatten(0, 1)[wanted.to(images.device)].to(self.model.device))
        places = torch.nonzero(wanted)[:, 0].to(self.model.device)
        features = vectors.new_zeros(rows * cameras, *vectors.shape[1:]).index_copy(0, places, vectors)
        (seen,) = self._tensors(np.repeat(camera_valid, vectors.shape[1], axis=1))
        return features.reshape(rows, -1, vectors.shape[-1]), seen

    def _tensors(self, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array).to(self.model.device, non_blocking=True) for array in arrays)

    def _count(self, counts: Counter[str], example: str = "") -> None:
        """Add up, and log the first of each kind."""
        for name, count in counts.items():
            if count and name not in ("rows", "padded_rows") and not self.counts[name]:
                logger.warning("%s%s", noticed(name), example and f": {example}")
        self.counts.update(counts)


def _as_architecture(given: Architecture | Mapping[str, Any] | str | Path | None) -> Architecture | None:
    if given is None or isinstance(given, Architecture):
        return given
    return Architecture.from_json(dict(given) if isinstance(given, Mapping) else given)


def _device(asked: torch.device | str | None, config: PI0FastConfig) -> torch.device:
    """The device asked for, or the configuration's where this machine has it, else the CPU.

    Raises:
        PolicyError: the one asked for is none that torch knows, or not there.
    """
    name = str(next(name for name in (asked, config.device, "cpu") if name is not None))
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        if asked is not None:
            raise PolicyError(f"the device {name!r} cannot be used: {reason}") from error
        logger.warning("the configuration's device %r cannot be used (%s): using the CPU", name, reason)
        return torch.device("cpu")
    return torch.device(name)
