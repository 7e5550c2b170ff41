"""A reward that is the same for all responses moves no weight, in any dtype and with any options.

Without a KL term no optimizer step is taken. With a KL term the gradient is that of KL(pi || ref) between equal
weights. It is exactly 0 only if the same arithmetic computes both sides, and AdamW turns any other value into full
steps.
"""

import torch
from helpers import PYTHON, built, parametrize

from train import train_step

OPTIONS = [  # without and with a KL term
    {}, dict(tis="sequence", inflight_groups=4, max_staleness=2),
    dict(tis="token", reject="token", top_k=20, top_p=0.9, min_p=0.01), dict(gradient_checkpointing=True),
]


@parametrize("dtype", ["float32", "bfloat16", "float16"])
@parametrize("options", OPTIONS, ids=str)
def test_a_constant_reward_moves_no_weight(good, tmp_path, dtype, options):
    (tmp_path / "task.py").write_text(PYTHON.replace("float(len(response) % 3)", "1.0"))
    trainer = built(good, tmp_path, task=str(tmp_path / "task.py"), lr=1e-4, lr_warmup_steps=0, max_new_tokens=6,
                          micro_batch_tokens=40, dtype=dtype,
                          kl_coef=0.05 if options else 0.0, **options)  # fmt: skip
    before = trainer.policy.copied_weights()
    for step in (1, 2):
        metrics = train_step(trainer, step).metrics
        expected = dict(kl_ref=0.0, grad_norm=0.0, updates=2) if options else dict(skipped_updates=2)
        assert metrics | expected == metrics
    assert trainer.engine.weight_version == (3 if options else 1)  # without a step there are no new weights
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.policy.copied_weights().items())
