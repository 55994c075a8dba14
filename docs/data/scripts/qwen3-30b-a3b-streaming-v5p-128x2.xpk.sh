#!/usr/bin/env bash
# Qwen3-30B-A3B, Streaming DiLoCo on two v5p-128 slices
# Made by: diloco recipe qwen3-30b-a3b-streaming-v5p-128x2 --target xpk
# Resume: run it again with the same RUN_NAME and BASE_OUTPUT_DIRECTORY; MaxText goes on from
# its newest checkpoint. It does not notice changed DiLoCo flags, so change none.
# Bootstrap: set LOAD_PARAMETERS_PATH to the parameters of a one-slice run, with a new RUN_NAME.
# Words after the script's name go to xpk: --dry-run --skip-validation prints the manifest.
set -euo pipefail

: "${XPK_CLUSTER:?set it to the name of the GKE cluster that xpk made}"
: "${PROJECT:?set it to the Google Cloud project of the cluster}"
: "${ZONE:?set it to the zone of the cluster}"
: "${DOCKER_IMAGE:?set it to an image that holds MaxText and its requirements}"
: "${WORKLOAD:?set it to the name of this workload, new each time: a-z, 0-9 and - only}"
: "${RUN_NAME:?set it to the name of the run, under which its checkpoints are found}"
: "${BASE_OUTPUT_DIRECTORY:?set it to where runs are written, such as a gs:// folder}"
: "${DATASET_PATH:?set it to the ArrayRecord files to train on, a pattern}"
: "${TOKENIZER_PATH:?set it to a Hugging Face tokenizer, a name or a folder}"
: "${CHECKPOINT_PERIOD:=500}" # steps between two checkpoints
: "${MAX_RESTARTS:=3}" # restarts after a failure

if [[ ! "${WORKLOAD}" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]]; then
  echo "WORKLOAD ${WORKLOAD} is no name for Kubernetes; use 1 to 40 of a-z, 0-9 and -, a letter first" >&2
  exit 2
fi

train=(
  python3 -m maxtext.trainers.pre_train.train maxtext/configs/base.yml
  "run_name=${RUN_NAME}"
  "base_output_directory=${BASE_OUTPUT_DIRECTORY}"
  model_name=qwen3-30b-a3b
  dataset_type=grain
  "grain_train_files=${DATASET_PATH}"
  tokenizer_type=huggingface
  "tokenizer_path=${TOKENIZER_PATH}"
  steps=20000
  max_target_length=8192
  per_device_batch_size=4
  opt_type=adamw
  learning_rate=0.0001
  learning_rate_schedule_steps=20000
  warmup_steps_fraction=0.1
  learning_rate_final_fraction=0.1
  adam_b1=0.9
  adam_b2=0.95
  adam_weight_decay=0.1
  gradient_clipping_threshold=1
  z_loss_multiplier=1e-05
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
  diloco_sync_period=49
  diloco_outer_lr=0.7
  diloco_outer_momentum=0.9
  remat_policy=full
  load_balance_loss_weight=0.001
  enable_streaming_diloco=true
  num_diloco_fragments=49
  use_sequential_layers=false
  num_communication_overlapping_steps=2
  communication_overlapping_alpha=0.5
)
if [[ -n "${LOAD_PARAMETERS_PATH:-}" ]]; then
  train+=("load_parameters_path=${LOAD_PARAMETERS_PATH}")
fi

# Flags of the TPU compiler.
libtpu_flags=(
  --xla_enable_async_all_gather=true # gather weights in the background
  --xla_tpu_enable_async_collective_fusion=true # run collectives inside the fusions beside them
  --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true # the gathers of weights among them
  --xla_tpu_overlap_compute_collective_tc=true # let the TensorCore compute while a collective runs
)

# The container's environment. HF_TOKEN, if set, is read by xpk from this shell: it is in
# no command line and in no file here, but whoever may read the workload can read it.
env_file="$(mktemp)"
trap 'rm -f "${env_file}"' EXIT
printf 'LIBTPU_INIT_ARGS=%s\n' "${libtpu_flags[*]}" >"${env_file}"
if [[ -n "${HF_TOKEN:-}" ]]; then
  export HF_TOKEN
  printf 'HF_TOKEN\n' >>"${env_file}"
fi

capacity=()
if [[ -n "${RESERVATION:-}" ]]; then
  capacity+=("--reservation=${RESERVATION}")
fi

# One line in which every word is quoted for the shell of the container.
printf -v command '%q ' "${train[@]}"

xpk workload create \
  --cluster="${XPK_CLUSTER}" \
  --project="${PROJECT}" \
  --zone="${ZONE}" \
  --device-type=v5p-128 \
  --num-slices=2 \
  --docker-image="${DOCKER_IMAGE}" \
  --workload="${WORKLOAD}" \
  --env-file="${env_file}" \
  --max-restarts="${MAX_RESTARTS}" \
  --command="${command}" \
  "${capacity[@]}" "$@"
