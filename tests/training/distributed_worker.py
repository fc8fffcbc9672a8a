"""What each of two processes runs for test_distributed.py: three training steps under every kind of parallelism.

Started as `python -m torch.distributed.run --nproc-per-node 2 -m tests.training.distributed_worker FOLDER SCENARIO...`;
FOLDER/model is a checkpoint. Every scenario leaves FOLDER/SCENARIO/model.safetensors (rank 0) and result.json. The same
functions run in the test's own process for the values to compare with.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import kimi_hf
from kimi_hf.training import RouterBalanceCallback

STEPS, ROWS, LENGTH = 3, 4, 12


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, 64, (STEPS, ROWS, LENGTH), generator=generator)


def load(folder, checkpoint="model", **kwargs):
    return kimi_hf.KimiLinearForCausalLM.from_pretrained(
        Path(folder, checkpoint), dtype=torch.float32, **kwargs
    ).train()


def full(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().contiguous()


def loop(model, rows=slice(None), copies=1):
    """Three AdamW steps with router balance; the losses. `rows`: this process's part of a batch, of `copies` parts."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)  # foreach takes no mixture of kinds of tensors
    callback = RouterBalanceCallback()
    callback.attach(model)
    losses, counted = [], ROWS * (LENGTH - 1)
    for batch in batches():
        ids = batch[rows]
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=counted).loss * copies  # gradients are averaged
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        callback.step()
    callback.detach()
    return losses


def through_trainer(folder, name, resume=None, **arguments):
    """Three steps of a Trainer with router balance; a batch of four rows over all processes, labels masked unevenly."""
    model = load(folder)
    data = []
    for i, row in enumerate(batches().flatten(0, 1)):
        labels = row.clone()
        labels[: i % 4 * 2] = -100
        data.append({"input_ids": row, "labels": labels})
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = {
        "per_device_train_batch_size": ROWS // processes,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    settings = TrainingArguments(str(Path(folder, name)), **{**chosen, **arguments})
    if settings.fsdp:
        allow_fsdp_on_cpu(settings)
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[RouterBalanceCallback()])
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return trainer, {
        "losses": [entry["loss"] for entry in logs],
        "loads": [entry["router/load_max_over_mean"] for entry in logs],
    }


def allow_fsdp_on_cpu(settings):
    """Let accelerate's own FSDP2 run over gloo; without this it ignores the setting on a CPU and wraps the model in DDP.

    `AcceleratorState` turns FSDP on only where the processes are of a kind it lists, and MULTI_CPU is not in that list.
    Device and backend are settled by then (cpu, gloo), so naming another kind changes nothing else.
    """
    assert settings.device.type == "cpu" and dist.get_backend() == "gloo"
    PartialState().distributed_type = DistributedType.MULTI_GPU


def run_one(folder):
    model = load(folder)
    return model, {"losses": loop(model)}


def run_one_packed(folder):
    model = load(folder, "packed")
    return model, {"losses": loop(model)}


def run_one_trainer(folder):
    trainer, result = through_trainer(folder, "one_trainer")
    return trainer.model, result


def run_ddp(folder):
    trainer, result = through_trainer(folder, "ddp", ddp_backend="gloo")
    result["wrapped"] = type(trainer.model_wrapped).__name__
    return trainer.model, result


def run_accelerate(folder):
    """FSDP2 through accelerate: stopped and resumed by sharded checkpoints, the weights gathered and saved whole."""
    settings = {"ddp_backend": "gloo", "fsdp": True, "save_strategy": "steps", "save_steps": 1}
    settings["fsdp_config"] = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    through_trainer(folder, "accelerate", max_steps=STEPS - 1, **settings)
    stopped = str(Path(folder, "accelerate", f"checkpoint-{STEPS - 1}"))
    trainer, result = through_trainer(folder, "accelerate", stopped, **settings)
    model, whole = trainer.model, trainer.accelerator.get_state_dict(trainer.model)
    result["sharded"] = sum(isinstance(p, DTensor) for p in model.parameters())
    result["wrapped"] = [base.__name__ for base in type(trainer.model_wrapped).__mro__]
    released = Path(folder, "accelerate", "released")
    model.save_pretrained(released, is_main_process=dist.get_rank() == 0, state_dict=whole)
    return model, result


def sharded(folder, name, checkpoint="model", **config):
    """The loop on a model that transformers shards while it loads, and its weights in the released layout."""
    distributed = DistributedConfig(**config)
    model = load(folder, checkpoint, distributed_config=distributed)
    count = sum(isinstance(p, DTensor) for p in model.parameters())
    copies = distributed.dp_size
    rows = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2) if copies == 2 else slice(None)
    losses = loop(model, rows, copies)
    model.save_pretrained(Path(folder, name, "released"))
    return model, {"losses": losses, "sharded": count}


def run_tensor(folder):
    return sharded(folder, "tensor", tp_plan="auto")


def run_expert(folder):
    return sharded(folder, "expert", tp_size=2, ep_size=2)


def run_sharded_data(folder):
    return sharded(folder, "sharded_data", fsdp_size=2)


def run_expert_over_data(folder):
    return sharded(folder, "expert_over_data", fsdp_size=2, ep_size=2)


def run_packed_tensor(folder):
    return sharded(folder, "packed_tensor", "packed", tp_plan="auto")


def run_packed_expert(folder):
    return sharded(folder, "packed_expert", "packed", tp_size=2, ep_size=2)


def run_packed_data(folder):
    return sharded(folder, "packed_data", "packed", fsdp_size=2)


def run_uneven_groups(folder):
    return sharded(folder, "uneven_groups", "narrow", tp_size=2)


def run(folder, name):
    """Run a scenario and write what it ended with; an exception is a result too."""
    target = Path(folder, name)
    target.mkdir(exist_ok=True)
    tensors = {}
    try:
        model, result = globals()[f"run_{name}"](folder)
        tensors = {key: full(value) for key, value in model.state_dict().items()}
    except Exception:
        result = {"error": traceback.format_exc()}
    if not dist.is_initialized() or dist.get_rank() == 0 or "error" in result:
        save_file(tensors, target / "model.safetensors")
        (target / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in sys.argv[2:]:
        run(sys.argv[1], scenario)
    if dist.is_initialized():
        dist.destroy_process_group()
