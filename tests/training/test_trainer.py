"""transformers' Trainer: label masks, checkpointing, bf16, router balance, Muon and packed batches."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from kimi_hf.errors import ConfigError
from kimi_hf.training import MuonWithAdamW, RouterBalanceCallback, parameter_groups

from .models import tiny_model, tokens
from .test_balance import skewed_model

FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight", "o_norm.weight")


def data(rows=8, length=12):
    return [{"input_ids": row, "labels": row.clone()} for row in tokens(rows, length)]


def trainer(model, folder, dataset=None, *, callbacks=(), optimizers=(None, None), collator=None, **arguments):
    """A Trainer on the CPU that writes nothing; one plain SGD step of rate 1 unless told otherwise."""
    arguments = {
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(str(folder), **arguments),
        train_dataset=data() if dataset is None else dataset,
        callbacks=list(callbacks),
        optimizers=optimizers,
        data_collator=collator,
    )


def difference(one, other):
    theirs = dict(other.named_parameters())
    return max((p.float() - theirs[name].float()).abs().max().item() for name, p in one.named_parameters())


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_accumulation_equals_one_batch_with_labels_masked_unevenly(tmp_path):
    """The mean is over the labels of all micro-batches, not a mean of means; masked labels do not count."""
    found = []
    for size, steps in ((4, 1), (1, 4)):
        rows = data(4)
        for i, row in enumerate(rows):
            row["labels"][: 3 * i + 1] = -100
        model = tiny_model()
        run = trainer(
            model,
            tmp_path,
            rows,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            learning_rate=0.1,
        )
        run.train()
        found.append((model, losses(run)))
    assert difference(found[0][0], found[1][0]) < 1e-5
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)
    assert difference(found[0][0], tiny_model()) > 1e-3


def test_masked_labels_teach_nothing():
    model, ids = tiny_model(), tokens(2, 12)
    labels = ids.clone()
    labels[:, 6:] = -100
    full = model(input_ids=ids, labels=labels).loss
    short = model(input_ids=ids[:, :6], labels=ids[:, :6]).loss
    torch.testing.assert_close(full, short, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant, tmp_path):
    plain, checkpointed = tiny_model(), tiny_model()
    first = trainer(plain, tmp_path, learning_rate=0.1)
    first.train()
    second = trainer(
        checkpointed,
        tmp_path,
        learning_rate=0.1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    second.train()
    assert losses(first) == losses(second)
    assert difference(plain, checkpointed) < 1e-6
    assert difference(plain, tiny_model()) > 1e-3


def test_bf16_autocast_keeps_parameters_and_moments_in_fp32(tmp_path):
    model, reference = tiny_model(), tiny_model()
    run = trainer(model, tmp_path, bf16=True, max_steps=3, optim="adamw_torch", learning_rate=1e-2)
    run.train()
    exact = trainer(reference, tmp_path, max_steps=3, optim="adamw_torch", learning_rate=1e-2)
    exact.train()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(state["exp_avg"].dtype == torch.float32 for state in run.optimizer.optimizer.state.values())
    assert losses(run) == pytest.approx(losses(exact), rel=0.02)


def test_a_bf16_model_trains_with_its_fp32_tensors_kept(tmp_path):
    source = tiny_model()
    source.save_pretrained(tmp_path / "model")
    model = type(source).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    run = trainer(model, tmp_path, bf16=True, max_steps=2, optim="adamw_torch", learning_rate=1e-2)
    run.train()
    assert all(torch.isfinite(torch.tensor(losses(run))))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in tensors if name.endswith(FLOAT32)}
    assert {tensor.dtype for name, tensor in tensors.items() if name not in kept} == {torch.bfloat16}


def test_router_balance_logs_and_balances_inside_a_trainer(tmp_path):
    rows = data(64, 48)
    runs = {}
    for update in (True, False):
        model = skewed_model()
        callback = RouterBalanceCallback("quantile", update=update)
        run = trainer(
            model,
            tmp_path,
            rows,
            callbacks=[callback],
            max_steps=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            optim="adamw_torch",
        )
        run.train()
        runs[update] = [entry for entry in run.state.log_history if "loss" in entry]
        assert not callback.statistics, "nothing is watched after training"
    for entries in runs.values():
        assert len(entries) == 8
        for key in ("load_max_over_mean", "worst_load_max_over_mean", "entropy", "dead_experts"):
            assert all(f"router/{key}" in entry for entry in entries), key
    key = "router/worst_load_max_over_mean"
    assert runs[True][0][key] > 3.5 and runs[True][-1][key] < 1.5
    assert min(entry[key] for entry in runs[False]) > 3.5


def test_balancing_a_dense_model_is_refused_when_training_begins(tmp_path):
    model = tiny_model(num_experts=None, routed_expert_hidden_size=None, latent_moe_use_norm=False)
    with pytest.raises(ConfigError, match="no routed experts"):
        trainer(model, tmp_path, callbacks=[RouterBalanceCallback()]).train()


@pytest.mark.parametrize("per_head", [False, True])
def test_muon_follows_the_trainers_schedule_and_resumes(per_head, tmp_path):
    """A schedule reaches both optimisers; four steps equal two, a checkpoint, and two more."""

    def run(model, **arguments):
        optimizer = MuonWithAdamW(model, lr=1e-2, per_head=per_head)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        arguments = {"max_steps": 4, "max_grad_norm": 1.0, **arguments}
        return trainer(model, tmp_path, optimizers=(optimizer, schedule), **arguments), optimizer

    straight = tiny_model()
    first, optimizer = run(straight)
    first.train()
    assert losses(first)[-1] < losses(first)[0]
    rates = {g["lr"] for inner in (optimizer.muon, optimizer.adamw) for g in inner.param_groups}
    assert rates == {1e-2 / 5}
    half, _ = run(tiny_model(), max_steps=2, save_strategy="steps", save_steps=2)
    half.train()
    resumed = tiny_model(seed=7)
    second, _ = run(resumed)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert difference(resumed, straight) < 1e-6


def test_parameter_groups_through_a_trainer(tmp_path):
    """The Trainer keeps the two groups and their decay."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    run = trainer(model, tmp_path, optimizers=(optimizer, None), max_steps=2)
    run.train()
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]


def test_flattened_batches_train_like_separate_rows(tmp_path):
    """transformers' own collator for packed documents, with positions and with cumulative lengths."""
    rows = [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in (5, 9, 12, 3)]
    separate, counted = tiny_model(), sum(len(row["input_ids"]) - 1 for row in rows)
    total = 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        total = total + separate(input_ids=ids, labels=ids, num_items_in_batch=counted).loss
    total.backward()
    with torch.no_grad():
        for parameter in separate.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    for settings in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True, "return_position_ids": False}):
        packed = tiny_model()
        run = trainer(packed, tmp_path, rows, collator=DataCollatorWithFlattening(**settings), learning_rate=0.1)
        run.train()
        assert difference(packed, separate) < 1e-5, settings
        assert losses(run)[0] == pytest.approx(total.item(), abs=1e-4)
