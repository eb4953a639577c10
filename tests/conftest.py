"""What all tests share: one server of forks, which imports the heavy packages once per session."""

import hypothesis

from lightning_shard.testing import preload

preload(
    "s3fs",
    "torch.distributed.pipelining",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)

# a loaded machine is no failure
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
