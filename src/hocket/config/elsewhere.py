"""Say what the settings of TRL, OpenRLHF and verl are called here."""

from hocket.common import markdown

NAMES_ELSEWHERE = {  # here → there: last words of a dotted key
    "model.path": "model_name_or_path pretrain actor_rollout_ref.model.path",
    "model.dtype": "bf16 fp16 torch_dtype",
    "model.lora.rank": "lora_r lora_rank lora.r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules lora_target_modules",
    "data.source: hf:NAME:SUBSET": "subset dataset_config",
    "data.source": "dataset_name prompt_data prompt_dataset train_files",
    "data.prompt_column": "input_key prompt_key",
    "data.answer_column": "label_key",
    "data.chat_template={OPTION: VALUE}": "chat_template_kwargs",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "eval.data.source": "eval_dataset eval.dataset val_files",
    "eval.samples": "num_generations_eval val_kwargs.n eval.n_samples_per_prompt",
    "eval.every_steps": "eval_steps eval.steps test_freq",
    "rewards.functions, plugins": "reward_funcs reward_weights remote_rm_url custom_reward_function.path",
    "rollout.group_size": "num_generations n_samples_per_prompt rollout.n",
    "rollout.prompts_per_step": "rollout_batch_size rollout.batch_size data.train_batch_size",
    "rollout.prompts_per_step, trainer.micro_batch_tokens": "per_device_train_batch_size gradient_accumulation_steps",
    "rollout.max_tokens": "max_completion_length max_new_tokens generate_max_len max_response_length response_length",
    "no setting: training samples from the whole distribution": "top_p top_k min_p repetition_penalty",
    "algorithm.clip_low and algorithm.clip_high": "epsilon clip_ratio eps_clip eps_clip_low_high",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "algorithm.kl_coef, with algorithm.kl": "beta init_kl_coef kl.init_coef kl_loss_coef",
    "algorithm.preset": "adv_estimator advantage_estimator advantage.estimator",
    "algorithm.preset or algorithm.aggregate": "loss_type loss_agg_mode loss",
    "algorithm.scale": "scale_rewards norm_adv_by_std_in_grpo no_std_norm no_advantage_std_norm",
    "algorithm.ratio": "importance_sampling_level",
    "algorithm.oversampling": "dynamic_filtering dynamic_filtering_enable",
    "algorithm.epochs": "num_iterations ppo_epochs",
    "algorithm.minibatches, their number": "ppo_mini_batch_size steps_per_generation",
    "critic.learning_rate": "critic_learning_rate critic.lr critic.optim.lr critic.adam.lr",
    "critic.path": "critic.model_name_or_path critic_pretrain critic.model.path",
    "trainer.learning_rate": "lr actor_learning_rate",
    "trainer.schedule": "lr_scheduler_type lr_scheduler",
    "trainer.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_ratio",
    "trainer.micro_batch_tokens": "micro_train_batch_size train.micro_batch_size ppo_micro_batch_size_per_gpu",
    "trainer.steps": "max_steps total_training_steps",
    "sft.epochs, or in GRPO trainer.steps, a number of steps": "num_train_epochs num_episodes total_epochs",
    "no setting: sft teaches nothing but the assistant's turns": "assistant_only_loss completion_only_loss",
    "server.urls": "vllm_server_base_url",
    "server.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "checkpoint.every_steps": "save_steps save_freq",
    "checkpoint.resume": "resume_from_checkpoint load_checkpoint resume_mode",
    "observe.loggers": "report_to use_tensorboard use_wandb trainer.logger",
    "run.dir": "output_dir default_local_dir",
    "no setting: every step is logged": "logging_steps",
}
_HERE = {name: setting for setting, names in NAMES_ELSEWHERE.items() for name in names.split()}


def name_here(key: str) -> str | None:
    """Return what a key that ends with a name from elsewhere is called here."""
    words = key.split(".")
    return next((_HERE[end] for i in range(len(words)) if (end := ".".join(words[i:])) in _HERE), None)


def names_table() -> str:
    rows = ((here, f"`{names.replace(' ', '`, `')}`") for here, names in NAMES_ELSEWHERE.items())
    return markdown.table(("here", "in TRL, OpenRLHF or verl"), rows)
