"""Random LightningModules as source text, combined of what users write: blocks, loops over them, losses, logs, hooks.

Each combination trains on one process. Samples of a batch don't depend on each other and losses are means over them,
so it trains alike on stages and data ranks too. ``source(seed)`` is the text, with a function ``batches``.
"""

from __future__ import annotations

from random import Random
from textwrap import indent

from tests.random_networks.network import (
    Network,
    arguments,
    embedding,
    head,
    layers,
    loop,
    what_blocks_keep,
    what_blocks_return,
)
from tests.random_networks.pieces import CLASSES, EMBEDDINGS, HEADER, INPUTS, OF_CLASSES, OPTIMIZERS, PLANS, TRAINERS
from tests.random_networks.steps import UNPACK, hooks, step


def source(seed: int) -> str:
    """The text of a Python module with ``Module``, ``batches``, ``TRAINER``'s arguments and a ``PLAN``."""
    random = Random(seed)
    kind = random.choice([*EMBEDDINGS, "tokens"])
    net = Network(random, kind, random.choice([4, 4, 5, 6]), random.random() < 0.3)
    for add in (embedding, layers, arguments, what_blocks_return, what_blocks_keep, loop, head, step, hooks):
        add(net)
    return _text(net, seed)


def _text(net: Network, seed: int) -> str:
    random = net.random
    made = f"Block() for i in range({net.number})"
    blocks = {
        "nn.ModuleList": f"nn.ModuleList({made})",
        "nn.Sequential": f"nn.Sequential(*({made}))",
        "nn.ModuleDict": f"nn.ModuleDict({{f'block {{i}}': {made}}})",
    }[net.holder]
    init = [f"self.blocks = {blocks}"]
    init = [*init, *net.init] if net.chance(0.3) else [*net.init, *init]
    forward = ["def forward(self, x, cond):" if net.is_conditioned else "def forward(self, x):"]
    forward += ["    " + line for line in (*net.before, *net.loop, *net.after)]
    if net.is_module:
        classes = []
        own_forward = forward
    else:
        classes = [_class("Net(nn.Module)", init, forward)]
        init = ["self.net = Net()"]
        own_forward = [forward[0], f"    return self.net(x{', cond' * net.is_conditioned})"]
    returned = random.choice(
        [
            "{'loss': loss}",
            "{'loss': loss, 'pred': pred.detach()}",
            "{'loss': loss, 'more': [y, {'pred': pred.detach()}]}",
        ]
    )
    step = [UNPACK, *net.step, *net.logs, f"return {returned}"]
    training = ["def training_step(self, batch, batch_idx):", *("    " + line for line in step)]
    optimizers = ["def configure_optimizers(self):", *("    " + each for each in random.choice([*OPTIMIZERS.values()]))]
    methods = [own_forward, training, *net.methods, optimizers]
    places = "(8, 6)" if net.is_per_token else "(8,)"
    number = CLASSES[net.kind]
    targets = f"torch.randint(0, {number}, {places}, generator=g)"
    if net.loss not in OF_CLASSES:
        targets = f"torch.rand(*{places}, {number}, generator=g)"
    batch = {
        "x": INPUTS[net.kind],
        "y": targets,
        "cond": "torch.randn(8, 3, generator=g)",
        "side": "torch.randint(0, 5, (8,), generator=g)",
        "weight": "torch.rand(8, generator=g)",
    }
    lines = [f"    g = torch.Generator().manual_seed({seed})", "    return ["]
    lines += ["        {", *(f"            '{key}': {made}," for key, made in batch.items()), "        }"]
    lines += ["        for _ in range(4)", "    ]"]
    return "\n\n\n".join(
        [
            HEADER.rstrip(),
            _class(
                "Block(nn.Module)",
                net.block_init,
                _method(f"forward(self, {', '.join(net.block_arguments)})", net.block_forward),
            ),
            *classes,
            _class("Module(L.LightningModule)", [*init, *net.module_init], *methods),
            "\n".join(["def batches():", *lines]),
            f"TRAINER = {random.choice(TRAINERS)!r}\nPLAN = {PLANS.get(net.layer)!r}\n",
        ]
    )


def _method(signature: str, lines: list[str]) -> list[str]:
    return [f"def {signature}:", *("    " + line for line in lines)]


def _class(head: str, init: list[str], *methods: list[str]) -> str:
    own = [_method("__init__(self)", ["super().__init__()", *init]), *methods]
    return f"class {head}:\n" + "\n\n".join(indent("\n".join(lines), "    ") for lines in own)
