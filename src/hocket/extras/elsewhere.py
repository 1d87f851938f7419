"""Say what the settings of TRL, OpenRLHF and verl are called here."""

from hocket.common import markdown

NAMES_ELSEWHERE = {  # here → there: last words of a dotted key
    "model.path": "model_name_or_path model_name pretrain actor_rollout_ref.model.path",
    "model.dtype": "bf16 fp16 torch_dtype",
    "model.max_length": "max_seq_length max_seq_len max_model_len",
    "model.lora={}": "use_peft use_lora",
    "model.lora.rank": "lora_r lora_rank lora.r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules lora_target_modules",
    "model.lora={quantize: nf4}": "load_in_4bit load_in_8bit",
    "no setting: dropout is off": "disable_dropout lora_dropout",
    "no setting: a model's own code is never run": "trust_remote_code",
    "data.source: hf:NAME:SUBSET": "subset dataset_config",
    "data.source": "dataset dataset_name dataset_path data_path prompt_data prompt_dataset train_file train_files",
    "data.split": "dataset_train_split",
    "data.limit": "max_samples train_max_samples",
    "data.prompt_column": "input_key prompt_key",
    "data.answer_column": "label_key",
    "data.chat_template": "apply_chat_template",
    "data.chat_template={OPTION: VALUE}": "chat_template_kwargs",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "eval.data.source": "eval_dataset eval.dataset val_files",
    "eval.data, with its split": "dataset_test_split",
    "eval.samples": "num_generations_eval val_kwargs.n eval.n_samples_per_prompt",
    "eval.every_steps": "eval_steps eval.steps test_freq eval_strategy evaluation_strategy eval_every",
    "rewards.functions, plugins": "reward_funcs reward_weights remote_rm_url custom_reward_function.path",
    "rewards.functions={reward_model: {weight: 1, path: FOLDER}}": "reward_model_path reward_pretrain "
    "reward_model.path",
    "rollout.group_size": "num_generations n_samples_per_prompt rollout.n",
    "rollout.prompts_per_step": "rollout_batch_size rollout.batch_size train_batch_size trainer.batch_size "
    "generation_batch_size",
    "rollout.prompts_per_step, trainer.micro_batch_tokens": "per_device_train_batch_size gradient_accumulation_steps",
    "rollout.max_tokens": "max_completion_length max_new_tokens generate_max_len max_response_length response_length",
    "no setting: training samples from the whole distribution": "top_p top_k min_p repetition_penalty",
    "no setting: vLLM generates, always": "use_vllm",
    "env.max_turns": "max_assistant_turns multi_turn.max_turns",
    "algorithm.clip_low and algorithm.clip_high": "epsilon clip_ratio eps_clip eps_clip_low_high cliprange",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "algorithm.kl_coef, with algorithm.kl": "beta init_kl_coef kl.init_coef kl_loss_coef",
    "algorithm.kl": "kl_estimator kl_loss_type kl_penalty use_kl_loss",
    "algorithm.kl_in": "use_kl_in_reward kl_target kl_horizon",
    "algorithm.reference": "ref_model ref_model_path ref.model.path",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.preset": "adv_estimator advantage_estimator advantage.estimator",
    "algorithm.preset or algorithm.aggregate": "loss_type loss_agg_mode loss",
    "algorithm.baseline={name: critic, discount: 1, gae_lambda: 1}": "gamma lam lambd",
    "algorithm.scale": "scale_rewards norm_adv_by_std_in_grpo no_std_norm no_advantage_std_norm",
    "algorithm.ratio": "importance_sampling_level",
    "algorithm.correction": "vllm_importance_sampling_correction vllm_importance_sampling_cap",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "algorithm.overlong_share": "overlong_buffer_len overlong_buffer.len overlong_buffer.enable",
    "algorithm.oversampling": "dynamic_filtering dynamic_filtering_enable filter_groups.enable",
    "algorithm.reward_range": "dynamic_filtering_reward_range",
    "algorithm.epochs": "num_iterations ppo_epochs",
    "algorithm.minibatches, their number": "ppo_mini_batch_size steps_per_generation",
    "critic.learning_rate": "critic_learning_rate critic.lr critic.optim.lr critic.adam.lr",
    "critic.path": "critic.model_name_or_path critic_pretrain critic.model.path",
    "critic.warmup_steps": "critic_warmup freezing_actor_steps",
    "trainer.learning_rate": "lr actor_learning_rate",
    "trainer.schedule": "lr_scheduler_type lr_scheduler",
    "trainer.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_ratio",
    "trainer.betas": "adam_beta1 adam_beta2 adam_betas",
    "trainer.max_grad_norm": "grad_clip clip_grad_norm",
    "trainer.micro_batch_tokens": "micro_train_batch_size train.micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu micro_rollout_batch_size log_prob_micro_batch_size_per_gpu per_device_eval_batch_size",
    "no setting: rows are packed, without padding": "packing packing_samples use_remove_padding",
    "trainer.gradient_checkpointing": "enable_gradient_checkpointing gradient_checkpointing_kwargs",
    "trainer.sequence_parallel": "ulysses_sequence_parallel_size ring_attn_size",
    "trainer.offload_optimizer": "adam_offload optimizer_offload",
    "trainer.kernels": "use_liger_kernel use_liger_loss",
    "trainer.steps": "max_steps num_steps total_steps total_training_steps",
    "sft.epochs, or in GRPO trainer.steps, a number of steps": "num_train_epochs num_epochs max_epochs num_episodes "
    "total_epochs trainer.epochs",
    "no setting: sft teaches nothing but the assistant's turns": "assistant_only_loss completion_only_loss",
    "pipeline.max_staleness": "async_train async_queue_size",
    "server.urls": "vllm_server_base_url vllm_server_host vllm_server_port",
    "server.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "server.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "launch.servers": "vllm_num_engines",
    "launch.trainers": "num_gpus nproc_per_node n_gpus_per_node actor_num_gpus_per_node",
    "launch.share_gpu": "vllm_mode vllm_enable_sleep vllm_enable_sleep_mode colocate_all_models",
    "sync.backend": "vllm_sync_backend",
    "checkpoint.every_steps": "save_steps save_freq save_strategy save_every",
    "checkpoint.keep": "save_total_limit max_ckpt_num",
    "checkpoint.resume": "resume_from_checkpoint load_checkpoint resume_mode",
    "observe.loggers": "report_to use_tensorboard use_wandb trainer.logger",
    "observe.loggers=[{name: wandb, project: NAME}]": "wandb_project project_name",
    "run.dir": "output_dir default_local_dir save_path ckpt_path run_name experiment_name",
    "no setting: every step is logged": "logging_steps log_every",
    "no setting: every rollout is in RUN/rollouts": "log_completions",
}
_HERE = {name: setting for setting, names in NAMES_ELSEWHERE.items() for name in names.split()}


def name_here(key: str) -> str | None:
    """Return what a key that ends with a name from elsewhere is called here."""
    words = key.split(".")
    return next((_HERE[end] for i in range(len(words)) if (end := ".".join(words[i:])) in _HERE), None)


def names_table() -> str:
    rows = ((here, f"`{names.replace(' ', '`, `')}`") for here, names in NAMES_ELSEWHERE.items())
    return markdown.table(("here", "in TRL, OpenRLHF or verl"), rows)
