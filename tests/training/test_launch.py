"""What torchrun and accelerate say in a process' environment: obeyed, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from pi0_fast.train_config import TrainConfig, parse_train
from pi0_fast.training.launch import Launch, read_launch
from pi0_fast.types import UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
#: As accelerate 1.15 sets them for examples/accelerate/fsdp2.yaml.
FSDP = {
    **TORCHRUN,
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "DecoderLayer,EncoderLayer",
    "FSDP_BACKWARD_PREFETCH": "NO_PREFETCH",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


def config(**flags: Any) -> TrainConfig:
    given = {"dataset.repo_id": "a/b", "policy.path": "start", **flags}
    return parse_train(TrainConfig, [f"--{name}={value}" for name, value in given.items()], "pi0-fast train")


def test_one_process() -> None:
    assert read_launch(config(), {}) == Launch(0, 1, 0, "one")
    assert read_launch(config(distributed="fsdp"), {"WORLD_SIZE": "1"}).engine == "one"


def test_torchrun() -> None:
    assert read_launch(config(), TORCHRUN) == Launch(3, 8, 1, "ddp")
    assert read_launch(config(distributed="fsdp"), TORCHRUN) == Launch(3, 8, 1, "fsdp")


def test_accelerate() -> None:
    assert read_launch(config(), FSDP) == Launch(3, 8, 1, "fsdp")
    assert not read_launch(config(), {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}).reshard_after_forward
    assert read_launch(config(), {**TORCHRUN, "ACCELERATE_USE_CPU": "true"}).cpu
    asked = {**TORCHRUN, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert read_launch(config(gradient_accumulation_steps=4), asked).engine == "ddp"
    known = read_launch(config(), {**FSDP, "ACCELERATE_NEW": "1", "FSDP_NEW": "1"})
    assert known.unknown == ("ACCELERATE_NEW", "FSDP_NEW")
    # Without accelerate, FSDP_* are somebody else's.
    assert read_launch(config(), {**TORCHRUN, "FSDP_VERSION": "1"}).engine == "ddp"


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        ({"WORLD_SIZE": "2"}, {}, "RANK is not set"),
        ({**TORCHRUN, "RANK": "one"}, {}, "RANK is 'one'"),
        ({**TORCHRUN, "RANK": "8"}, {}, "RANK=8 and WORLD_SIZE=8"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "ACCELERATE_USE_DEEPSPEED=true"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "ACCELERATE_USE_MEGATRON_LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {}, "ACCELERATE_USE_PARALLELISM_CONFIG"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "--policy.compile_model=true"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {}, "--gradient_accumulation_steps=4"),
        (FSDP, {"distributed": "ddp"}, "leave out one of them"),
        ({**FSDP, "FSDP_VERSION": "1"}, {}, "fsdp_version: 2"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, {}, "FSDP_OFFLOAD_PARAMS=true"),
        ({**FSDP, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {}, "FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP"),
        ({**FSDP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "GemmaDecoderLayer"}, {}, "DecoderLayer,EncoderLayer"),
        ({**FSDP, "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, {}, "SHARDED_STATE_DICT"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "--policy.gradient_checkpointing=true"),
        ({**FSDP, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {}, "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP"),
        ({**FSDP, "FSDP_IGNORED_MODULES": "vision_tower"}, {}, "--freeze"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(
    variables: dict[str, str], flags: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_launch(config(**flags), variables)


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        ("no", "bfloat16", None),
        ("no", "float32", None),
        ("bf16", "bfloat16", None),
        ("bf16", "float32", "--policy.dtype=bfloat16"),
        ("fp16", "float32", "mixed_precision fp16"),
        ("fp8", "bfloat16", "mixed_precision fp8"),
    ],
)
def test_the_precision_is_the_policys(precision: str, dtype: str, message: str | None) -> None:
    launch = read_launch(config(), {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": precision})
    if message is None:
        launch.check_dtype(dtype)
        return
    with pytest.raises(UsageError, match=message):
        launch.check_dtype(dtype)
