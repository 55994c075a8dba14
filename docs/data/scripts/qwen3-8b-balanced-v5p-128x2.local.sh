#!/usr/bin/env bash
# Qwen3-8B, balanced 4-bit fragments on two v5p-128 slices
# Made by: diloco recipe qwen3-8b-balanced-v5p-128x2 --target local
# Resume: run it again with the same RUN_DIR; it goes on from the newest intact checkpoint.
# Words after the script's name go to diloco train, such as --set train.steps=100.
set -euo pipefail

: "${RUN_DIR:=runs/qwen3-8b-balanced-v5p-128x2}" # the run's directory

recipe=qwen3-8b-balanced-v5p-128x2
data=() # the recipe's own corpus, unless DATASET_PATH names a text
if [[ -n "${DATASET_PATH:-}" ]]; then
  data+=(--data "${DATASET_PATH}")
fi

exec diloco train "${recipe}" "${data[@]}" --run-dir "${RUN_DIR}" "$@"
