#!/usr/bin/env bash
# Qwen3-8B, vanilla DiLoCo on two v5p-128 slices
# Made by: diloco recipe qwen3-8b-vanilla-v5p-128x2 --target maxtext
# Resume: run it again with the same RUN_NAME and BASE_OUTPUT_DIRECTORY; MaxText goes on from
# its newest checkpoint. It does not notice changed DiLoCo flags, so change none.
# Bootstrap: set LOAD_PARAMETERS_PATH to the parameters of a one-slice run, with a new RUN_NAME.
set -euo pipefail

: "${RUN_NAME:?set it to the name of the run, under which its checkpoints are found}"
: "${BASE_OUTPUT_DIRECTORY:?set it to where runs are written, such as a gs:// folder}"
: "${DATASET_PATH:?set it to the ArrayRecord files to train on, a pattern}"
: "${TOKENIZER_PATH:?set it to a Hugging Face tokenizer, a name or a folder}"
: "${CHECKPOINT_PERIOD:=500}" # steps between two checkpoints

train=(
  python3 -m maxtext.trainers.pre_train.train maxtext/configs/base.yml
  "run_name=${RUN_NAME}"
  "base_output_directory=${BASE_OUTPUT_DIRECTORY}"
  model_name=qwen3-8b
  dataset_type=grain
  "grain_train_files=${DATASET_PATH}"
  tokenizer_type=huggingface
  "tokenizer_path=${TOKENIZER_PATH}"
  steps=20000
  max_target_length=2048
  per_device_batch_size=8
  opt_type=adamw
  learning_rate=0.0001
  learning_rate_schedule_steps=20000
  warmup_steps_fraction=0.1
  learning_rate_final_fraction=0.1
  adam_b1=0.9
  adam_b2=0.95
  adam_weight_decay=0.1
  gradient_clipping_threshold=1
  z_loss_multiplier=0
  data_shuffle_seed=0
  weight_dtype=float32
  dtype=bfloat16
  pure_nnx=true
  scan_layers=true
  enable_checkpointing=true
  async_checkpointing=true
  "checkpoint_period=${CHECKPOINT_PERIOD}"
  enable_diloco=true
  dcn_diloco_parallelism=2
  dcn_data_parallelism=1
  diloco_sync_period=100
  diloco_outer_lr=0.7
  diloco_outer_momentum=0.9
  remat_policy=full
)
if [[ -n "${LOAD_PARAMETERS_PATH:-}" ]]; then
  train+=("load_parameters_path=${LOAD_PARAMETERS_PATH}")
fi

exec "${train[@]}" "$@"
