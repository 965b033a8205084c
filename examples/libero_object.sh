#!/usr/bin/env bash
# One LIBERO task from demonstrations to a policy that acts, without a GPU: docs/libero.md.
# Usage: libero_object.sh [DIRECTORY [TASK]]; STEPS, EPISODES and EVALUATED make it shorter or longer.
# Where it was interrupted, what is there already is kept.
set -euo pipefail

output=${1:-libero_output}
task=${2:-libero_object/0}
steps=${STEPS:-2500}        # of training
episodes=${EPISODES:-300}   # demonstrations
evaluated=${EVALUATED:-50}  # all initial states of the task
mkdir -p "$output"
world=(--env.type=libero --env.task="$task" --env.image_size=64 --env.fast_rendering)

# Objects at random places: the benchmark's own initial states are for the evaluation.
[ -e "$output/dataset" ] || pi0-fast record "${world[@]}" \
    --env.options='{"init_states": false, "hard_reset": false}' \
    --repo_id=local/libero --root="$output/dataset" --n_episodes="$episodes" --every=4 --keep_after_success=8 \
    --noise_std='[0.1, 0.1, 0.1, 0.03, 0.03, 0.03, 0]' \
    --burst_share=0.03 --burst_std='[0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0]'

[ -e "$output/tokenizer" ] || pi0-fast train-tokenizer --repo_id=local/libero --root="$output/dataset" \
    --action_horizon=10 --vocab_size=512 --scale=5 --normalization_mode=MIN_MAX --output_dir="$output/tokenizer"

# First as recorded, then through the tokenizer: where these fail no policy can succeed.
pi0-fast replay --repo_id=local/libero --root="$output/dataset" --tokenizer="$output/tokenizer" \
    --output_dir="$output/replay" --overwrite

# The cameras get the names that published checkpoints have, so that the published command evaluates this one, too.
cameras='{"observation.images.image": "observation.images.base_0_rgb",
          "observation.images.image2": "observation.images.left_wrist_0_rgb"}'
cat > "$output/architecture.json" <<'JSON'
{"vision": {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 512,
            "image_size": 64, "patch_size": 16},
 "text": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
          "head_dim": 32, "intermediate_size": 512, "vocab_size": 4096}}
JSON
[ -e "$output/policy" ] || pi0-fast train --dataset.repo_id=local/libero --dataset.root="$output/dataset" \
    --dataset.cache_dir="$output/frames" --policy.type=pi0_fast --policy.architecture="$output/architecture.json" \
    --rename_map="$cameras" --policy.text_tokenizer_name=byte --policy.action_tokenizer_name="$output/tokenizer" \
    --policy.chunk_size=10 --policy.n_action_steps=5 --policy.device=cpu \
    --policy.normalization_mapping='{"STATE": "MIN_MAX", "ACTION": "MIN_MAX"}' \
    --policy.optimizer_lr=1e-3 --policy.scheduler_warmup_steps=50 \
    --policy.scheduler_decay_steps="$steps" --policy.scheduler_decay_lr=3e-5 \
    --steps="$steps" --batch_size=64 --num_workers=0 --eval_freq=0 --log_freq=50 --output_dir="$output/policy"

pi0-fast eval --policy.path="$output/policy/checkpoints/last/pretrained_model" --policy.max_action_tokens=256 \
    "${world[@]}" --policy.gradient_checkpointing=false --eval.batch_size=1 --eval.n_episodes="$evaluated" \
    --rename_map="$cameras" --save_videos --output_dir="$output/evaluation"
