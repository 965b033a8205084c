"""How a run was started: alone, by torchrun, or by `accelerate launch`, and what that asks of it.

torchrun says in RANK, WORLD_SIZE and LOCAL_RANK which of the processes this is. accelerate does the same, and says the
rest of its configuration in ACCELERATE_* and FSDP_*, which a script that builds an `Accelerator` would obey. Here each
of them is obeyed, or refused by its name with what to say instead. Left out: the processes themselves (processes.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pi0_fast.train_config import TrainConfig
from pi0_fast.types import UsageError

Engine = Literal["one", "ddp", "fsdp"]

_NO = ("", "0", "false", "no", "none")
#: Variables that ask for something that is not offered -> the values that do not ask for it, and what to do instead.
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": (_NO, "DeepSpeed is not offered: --distributed=fsdp shards the model"),
    "ACCELERATE_USE_MEGATRON_LM": (_NO, "Megatron-LM is not offered: --distributed=fsdp shards the model"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (_NO, "only data is shared out: --distributed=ddp or fsdp"),
    "ACCELERATE_IN_TPU_POD": (_NO, "TPUs are not offered"),
    "ACCELERATE_DYNAMO_BACKEND": (_NO, "leave it NO, and pass --policy.compile_model=true"),
}
_REFUSED_OF_FSDP = {
    "FSDP_OFFLOAD_PARAMS": (_NO, "weights are not moved to the CPU's memory: take more processes, or --peft.r=16"),
    "FSDP_AUTO_WRAP_POLICY": (
        ("transformer_based_wrap",),
        "the layers of both transformers are sharded one by one: TRANSFORMER_BASED_WRAP",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (_NO, "leave it false, and pass --policy.gradient_checkpointing=true"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (_NO, "leave it false, and pass --policy.gradient_checkpointing=true"),
    "FSDP_STATE_DICT_TYPE": (
        ("sharded_state_dict",),
        "training states are saved sharded, and policies whole: SHARDED_STATE_DICT",
    ),
    "FSDP_SHARDING_STRATEGY": (
        ("full_shard", "1"),
        "it is of version 1: leave it out, and set fsdp_reshard_after_forward",
    ),
    "FSDP_FORWARD_PREFETCH": (_NO, "it is of version 1: leave it out"),
    "FSDP_IGNORED_MODULES": (_NO, "all weights are sharded; --freeze leaves some out of training"),
}
#: What accelerate always sets and what changes no result: of version 1, of other policies of wrapping, of memory while
#: loading (here every process reads the weights), or with an effect of its own on the process (affinity, debugging).
_WITHOUT_EFFECT = (
    *("ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_CONFIG_FILE", "ACCELERATE_DYNAMO_MODE"),
    *("ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_DYNAMO_USE_DYNAMIC", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
    *("FSDP_MIN_NUM_PARAMS", "FSDP_BACKWARD_PREFETCH", "FSDP_USE_ORIG_PARAMS", "FSDP_SYNC_MODULE_STATES"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
)
_READ = (
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"),
    *("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "FSDP_VERSION", "FSDP_RESHARD_AFTER_FORWARD"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
)
#: Classes whose modules are sharded one by one, in model/gemma.py and model/siglip.py.
SHARDED_CLASSES = ("DecoderLayer", "EncoderLayer")


@dataclass(frozen=True)
class Launch:
    """Which process this is, and what its launcher asks for.

    Attributes:
        rank: of this process, below `count`.
        count: processes of the run, on all machines.
        local_rank: of this process among those of its machine: its GPU.
        engine: "one" process; "ddp", each with all weights; "fsdp", each with a part of them.
        reshard_after_forward: with fsdp, whether gathered weights are given up between forward and backward.
        cpu: whether the launcher asks for the CPU.
        precision: that the launcher asks for: "no" (nothing), "bf16", ...
        unknown: variables of accelerate that nothing here knows.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    engine: Engine = "one"
    reshard_after_forward: bool = True
    cpu: bool = False
    precision: str = "no"
    unknown: tuple[str, ...] = ()

    def check_dtype(self, dtype: str) -> None:
        """Refuse a policy of another number format than the launcher asks for.

        Raises:
            UsageError: it is neither "no" nor the policy's.
        """
        if self.precision in _NO or (self.precision, dtype) == ("bf16", "bfloat16"):
            return
        advice = "pass --policy.dtype=bfloat16" if self.precision == "bf16" else "there are float32 and bfloat16"
        raise UsageError(
            f"accelerate asks for mixed_precision {self.precision} (ACCELERATE_MIXED_PRECISION), but the policy is "
            f"{dtype}: {advice}, or set mixed_precision to 'no'"
        )


def read_launch(config: TrainConfig, environment: Mapping[str, str] | None = None) -> Launch:
    """How this process was started, by its environment (None: os.environ).

    Raises:
        UsageError: a variable is no number, contradicts another or a flag, or asks for what is not offered.
    """
    variables = os.environ if environment is None else environment
    count = _number(variables, "WORLD_SIZE", 1)
    rank = _number(variables, "RANK", 0 if count == 1 else None)
    local_rank = _number(variables, "LOCAL_RANK", 0 if count == 1 else None)
    if not 0 <= rank < count:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={count}: a rank is at least 0 and below the number of processes")
    _refuse(variables, _REFUSED)
    sharded = _asks(variables, "ACCELERATE_USE_FSDP")
    if sharded and config.distributed == "ddp":
        raise UsageError("--distributed=ddp, but accelerate's configuration asks for FSDP: leave out one of them")
    if sharded:
        _check_fsdp(variables)
    accumulation = variables.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation not in ("1", "auto", str(config.gradient_accumulation_steps)):
        raise UsageError(
            f"accelerate asks for {accumulation} gradient accumulation steps "
            f"(ACCELERATE_GRADIENT_ACCUMULATION_STEPS): pass --gradient_accumulation_steps={accumulation}"
        )
    engine: Engine = "one" if count == 1 else "fsdp" if sharded or config.distributed == "fsdp" else "ddp"
    reshard = variables.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() if sharded else "true"
    return Launch(
        rank,
        count,
        local_rank,
        engine,
        # Version 1 has names of strategies here, of which the default is this one.
        reshard_after_forward=reshard not in _NO,
        cpu=_asks(variables, "ACCELERATE_USE_CPU"),
        precision=variables.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        unknown=tuple(_unknown(variables, sharded)),
    )


def _number(variables: Mapping[str, str], name: str, default: int | None) -> int:
    text = variables.get(name, "")
    if not text and default is not None:
        return default
    if not text:
        raise UsageError(
            f"WORLD_SIZE={variables['WORLD_SIZE']}, but {name} is not set: start with torchrun or accelerate launch, "
            "which set both"
        )
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the environment variable {name} is {text!r}, which is no number") from None


def _asks(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() not in _NO


def _refuse(variables: Mapping[str, str], refused: Mapping[str, tuple[tuple[str, ...], str]]) -> None:
    for name, (allowed, advice) in refused.items():
        value = variables.get(name)
        if value is not None and value.lower() not in allowed:
            raise UsageError(f"accelerate's {name}={value} is not offered: {advice}")


def _check_fsdp(variables: Mapping[str, str]) -> None:
    version = variables.get("FSDP_VERSION", "1")
    if version != "2":
        raise UsageError(f"accelerate's FSDP_VERSION={version} is not offered: set fsdp_version: 2")
    _refuse(variables, _REFUSED_OF_FSDP)
    classes = variables.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    if classes is not None and sorted(name.strip() for name in classes.split(",")) != sorted(SHARDED_CLASSES):
        raise UsageError(
            f"accelerate's FSDP_TRANSFORMER_CLS_TO_WRAP={classes}: the classes here are {','.join(SHARDED_CLASSES)}"
        )


def _unknown(variables: Mapping[str, str], sharded: bool) -> Iterator[str]:
    known = {*_REFUSED, *_REFUSED_OF_FSDP, *_WITHOUT_EFFECT, *_READ}
    for name in sorted(variables):
        if name.startswith(("ACCELERATE_", "FSDP_") if sharded else "ACCELERATE_") and name not in known:
            yield name
