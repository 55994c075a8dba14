#!/usr/bin/env bash
#SBATCH --job-name=qwen3-8b-balanced-v5p-128x2
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=2 # a multiple: each island gets an equal part
#SBATCH --signal=B:TERM@120 # 120 s before the limit: save, then stop
#SBATCH --requeue
#SBATCH --open-mode=append
# Qwen3-8B, balanced 4-bit fragments on two v5p-128 slices
# Made by: diloco recipe qwen3-8b-balanced-v5p-128x2 --target slurm
# Resume: run it again with the same RUN_DIR; it goes on from the newest intact checkpoint.
# Words after the script's name go to diloco train, such as --set train.steps=100.
# Submit it with sbatch from a shell that has them.
set -euo pipefail

: "${RUN_DIR:=runs/qwen3-8b-balanced-v5p-128x2}" # the run's directory

recipe=qwen3-8b-balanced-v5p-128x2
data=() # the recipe's own corpus, unless DATASET_PATH names a text
if [[ -n "${DATASET_PATH:-}" ]]; then
  data+=(--data "${DATASET_PATH}")
fi

# In the background, so that this shell hears the signal and hands it on.
trap 'kill -TERM "$!"; wait "$!"' TERM
srun diloco train "${recipe}" "${data[@]}" --run-dir "${RUN_DIR}" "$@" &
wait "$!"
