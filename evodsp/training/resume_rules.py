"""What a resumed run does with each setting of `evodsp fit` that is not what it was: the table of all of them.

A test compares it with the settings that exist, so that a new one needs a rule.
"""

from __future__ import annotations

from typing import Literal

Rule = Literal["refused", "applied", "same", "free"]
"""refused: the run does not start. applied: from the next sample on. same: the run computes the same, with sums rounded in
another order. free: decides nothing about the weights (files, logs, validation's times, names of machines)."""

_STACK = "blocks msa_heads msa_head_width pair_heads pair_head_width triangle_channels outer_product_channels transition_factor"
_FEATURES = (
    "crop_size msa_clusters extra_msa max_templates recycles uniform_recycling masked_msa_fraction masked_uniform "
    "masked_profile masked_same block_delete block_delete_fraction block_delete_blocks clamp_fape_fraction"
)
_TABLE: dict[Rule, dict[str, str]] = {
    "refused": {
        "": "seed init_from raw",
        "model.channels": "msa pair extra_msa single",
        "model.embedder": "max_relative_position recycle_bins recycle_min_distance recycle_max_distance",
        "model.extra_msa": _STACK,
        "model.evoformer": _STACK,
        "model.templates": (
            "enabled torsions channels blocks pair_heads pair_head_width triangle_channels transition_factor attention_heads "
            "attention_head_width distogram_bins distogram_min_distance distogram_max_distance unit_vector"
        ),
        "model.structure_module": (
            "iterations heads scalar_query_width scalar_value_width query_points value_points transition_layers angle_channels "
            "angle_blocks"
        ),
        "model.heads": (
            "distogram_bins distogram_min_distance distogram_max_distance plddt_bins plddt_channels experimentally_resolved "
            "predicted_aligned_error pae_bins pae_max_error"
        ),
        "data": "samples_per_epoch",
        "trainer": "limit_train_batches overfit_batches",
    },
    "applied": {
        "": "max_samples matmul_precision max_bad_samples",
        "model": "ema_decay",
        "model.extra_msa": "msa_dropout pair_dropout",
        "model.evoformer": "msa_dropout pair_dropout",
        "model.templates": "pair_dropout",
        "model.structure_module": "dropout",
        "model.loss": (
            "backbone_fape sidechain_fape torsion angle_norm distogram masked_msa plddt experimentally_resolved violation pae "
            "confidence_min_resolution confidence_max_resolution scale_by_length"
        ),
        "model.optimizer": (
            "lr beta1 beta2 eps warmup_samples schedule drop_samples drop_factor total_samples final_lr clip"
        ),
        "data": (
            "alignment_dir structure_dir store index train_chains validation_chains chain_data_cache sampling "
            "assumed_resolution template_structure_dir max_template_date obsolete time_limit skip_samples max_quarantined"
        ),
        "data.filters": "max_resolution max_residue_share max_release_date",
        "data.distillation": (
            "alignment_dir structure_dir store index chains chain_data_cache sampling fraction min_plddt max_msa_rows "
            "assumed_resolution"
        ),
        "data.distillation.filters": "max_resolution max_residue_share max_release_date",
        "data.train": _FEATURES,
        "data.validation": _FEATURES,
        "trainer": "max_steps max_epochs min_steps min_epochs precision gradient_clip_val gradient_clip_algorithm",
        "parallel": "wire",
    },
    "same": {
        "": "global_batch compile cuda_graphs",
        "model.extra_msa": "checkpoint",
        "model.evoformer": "checkpoint",
        "model.templates": "checkpoint",
        "data": "batch_size",
        "parallel": "sequence parameters overlap sockets",
        "plan": "triangle_outgoing triangle_incoming outer_product_mean extra_msa_axis stream_bias keep_gathered",
        "kernels": (
            "backend attention biased_attention dropout_add gated_linear gated_output gated_projection global_attention "
            "layer_norm linear outer_product pooled_projections projections transition triangle_product"
        ),
        "trainer": "accelerator accumulate_grad_batches deterministic benchmark",
    },
    "free": {
        "": (
            "output overwrite ckpt_path checkpoint_every checkpoint_every_samples checkpoint_every_minutes keep_last keep_best "
            "async_checkpoints stop_before_end peak_tflops replay_files"
        ),
        "data": "test_chains num_workers prefetch cache",
        "parallel": "timeout",
        "trainer": (
            "strategy devices num_nodes logger callbacks fast_dev_run max_time limit_val_batches limit_test_batches "
            "limit_predict_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps "
            "enable_checkpointing enable_progress_bar enable_model_summary inference_mode use_distributed_sampler profiler "
            "detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir "
            "enable_autolog_hparams model_registry"
        ),
    },
}

RULES: dict[str, Rule] = {
    f"{where}.{name}".lstrip("."): rule
    for rule, parts in _TABLE.items()
    for where, names in parts.items()
    for name in names.split()
}
"""Each setting's rule, by its dotted name."""
