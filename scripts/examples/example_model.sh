#!/usr/bin/env bash
# Makes data/example_model, which `evodsp predict --example` predicts with and `make demo` trains further.
#   scripts/examples/example_model.sh FOLDER
# It learns twelve families of a generator's other seed, then two of the three families of data/, then to keep bonds whole.
set -euo pipefail
folder=$1
python -m scripts.examples.synthetic --output "$folder/families" --seed 1 --families 12 --members 4 --held_out 1 --min_length 48 --max_length 72
head -8 data/train.txt > "$folder/two_families.txt" # helix bundles and meanders

fit() { evodsp fit --config configs/quickstart.yaml --output "$folder/$1" "${@:2}"; }
fit other --trainer.max_steps 2000 \
  --data.alignment_dir "$folder/families/alignments" --data.structure_dir "$folder/families/mmcif_files" \
  --data.train_chains "$folder/families/train.txt" --data.validation_chains "$folder/families/validation.txt"
two=(--data.train_chains "$folder/two_families.txt" --data.validation_chains '[s005_A,s010_A]')
fit two "${two[@]}" --init_from "$folder/other/checkpoints/last.ckpt" --trainer.max_steps 1000 \
  --model.optimizer.lr 2.0e-3 --model.loss.violation 0.3
fit whole "${two[@]}" --init_from "$folder/two/checkpoints/last.ckpt" --trainer.max_steps 500 \
  --model.optimizer.lr 1.0e-3 --model.loss.violation 1.0
evodsp weights export --checkpoint "$folder/whole/checkpoints/last.ckpt" --format safetensors --output "$folder/example_model"
