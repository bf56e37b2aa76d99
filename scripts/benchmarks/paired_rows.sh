#!/usr/bin/env bash
# Do paired rows matter? The same model predicts held-out complexes from paired rows, and from the same rows shuffled.
#
#   scripts/benchmarks/paired_rows.sh FOLDER SEED [STEPS]
#
# FOLDER/paired and FOLDER/shuffled are made unless they are there: 124 pairs of synthetic twins, which are two chains in each of
# two interfaces. Nothing but the pairing of their rows tells which (`python -m scripts.benchmarks.paired_rows FOLDER/paired`
# checks that). 24 pairs are held out. A model is trained with the seed, predicts the held-out complexes from both folders, and
# is scored. Training has two parts: at first only the distogram and masked letters count, because the errors of a pose that is
# guessed drown what rows tell. When the model begins to read rows, val/loss falls by a tenth within a thousand steps. STEPS are
# those of the first part. A folder takes 20 minutes of one CPU core and a model 50 to 75; what was stopped continues.
# Run it from the root of the source, in evodsp's environment.
set -euo pipefail
folder=${1:?FOLDER} seed=${2:?SEED} steps=${3:-16000}
run=$folder/seed_$seed
export OMP_NUM_THREADS=1

for name in paired shuffled; do
  [ -e "$folder/$name" ] && continue
  [ $name = shuffled ] && shuffled=true || shuffled=false
  mkdir -p "$folder"
  python -m scripts.examples.synthetic --output "$folder/$name" --families 2 --min_length 32 --max_length 32 --sequences 128 \
    --complexes 2 --members 100 --held_out 24 --twins true --shuffled $shuffled --seed 1
done

fit() {
  evodsp fit --config configs/dimers.yaml --seed "$seed" --ckpt_path auto --trainer.enable_progress_bar false \
    --data.alignment_dir "$folder/paired/alignments" --data.structure_dir "$folder/paired/mmcif_files" \
    --data.train_chains "$folder/paired/train.txt" --data.validation_chains "$folder/paired/validation.txt" \
    --data.train.msa_clusters 128 --data.validation.msa_clusters 128 --model.evoformer.outer_product_channels 16 \
    --model.evoformer.blocks 1 --model.extra_msa.blocks 0 --model.optimizer.lr 2e-3 "$@"
}
no_pose=()
for loss in backbone_fape sidechain_fape interface_fape chain_centre torsion plddt pae; do no_pose+=("--model.loss.$loss" 0); done
fit --output "$run/rows" --trainer.max_steps "$steps" --model.optimizer.schedule constant "${no_pose[@]}" \
  --model.loss.distogram 1 --model.loss.masked_msa 0.1 --model.evoformer.msa_dropout 0 --model.evoformer.pair_dropout 0
fit --output "$run/whole" --trainer.max_steps 3000 --init_from "$run/rows/checkpoints/last.ckpt"

mkdir -p "$run/fasta"
while read -r entry; do cp "$folder/paired/fasta/$entry.fasta" "$run/fasta"; done < "$folder/paired/validation.txt"
for name in paired shuffled; do
  evodsp predict "$run/fasta" --alignments "$folder/$name/alignments" --checkpoint "$run/whole/checkpoints/last.ckpt" \
    --output "$run/$name" --overwrite
  evodsp score --complexes true --predictions "$run/$name" --structures "$folder/paired/mmcif_files" \
    --held_out "$folder/paired/validation.txt" --output "$run/scores_$name" | sed -n "s/^held-out:/$name rows, &/p"
done
