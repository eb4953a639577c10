"""Random LightningModules as source text, combined of what users write: blocks, loops over them, losses, logs, hooks.

Each combination trains on one process. Samples of a batch don't depend on each other and losses are means over them,
so it trains alike on stages and data ranks too. ``source(seed)`` is the text, with a function ``batches``.
"""

from __future__ import annotations

from random import Random
from textwrap import indent

from tests.training.random_networks.network import (
    HOLDERS,
    Network,
    arguments,
    embedding,
    head,
    layers,
    loop,
    what_blocks_keep,
    what_blocks_return,
)
from tests.training.random_networks.pieces import (
    CLASSES,
    EMBEDDINGS,
    HEADER,
    INPUTS,
    LINEAR,
    OF_CLASSES,
    OPTIMIZERS,
    PLANS,
    TRAINERS,
)
from tests.training.random_networks.steps import hooks, step


def _wide(linear: str) -> tuple[list[str], list[str]]:
    forward = ["return super().forward(h + 0.1 * self.more(h), *others, **named)"]
    return [f"self.more = {linear}"], _method("forward(self, h, *others, **named)", forward)


BATCHES = {
    "dict": "{{'x': {x}, 'y': {y}, 'cond': {cond}, 'side': {side}, 'weight': {weight}}}",
    "tuple": "({x}, {y}, {cond}, {side}, {weight})",
    "nested": "[({x}, {cond}), {{'y': {y}, 'others': [{side}, {weight}]}}]",
}


def source(seed: int) -> str:
    """The text of a Python module with ``Module``, ``batches``, ``TRAINER``'s arguments and a ``PLAN``."""
    random = Random(seed)
    kind = random.choice([*EMBEDDINGS, "tokens"])
    net = Network(random, kind, random.choice([4, 4, 5, 6]), random.random() < 0.3)
    net.batch = random.choice(["dict", "dict", "tuple", "nested"])
    for add in (embedding, layers, arguments, what_blocks_return, what_blocks_keep, loop, head, step, hooks):
        add(net)
    return _text(net, seed)


def _text(net: Network, seed: int) -> str:
    random = net.random
    alternate = net.chance(0.2)
    made = "(Wide() if i % 2 else Block())" if alternate else "Block()"
    init = [f"self.blocks = {HOLDERS[net.holder].format(made=made, number=net.number)}"]
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
    step = [*net.unpack, *net.step, *net.logs, f"return {returned}"]
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
    lines += ["        " + BATCHES[net.batch].format(**batch)]
    lines += ["        for _ in range(4)", "    ]"]
    return "\n\n\n".join(
        [
            HEADER.rstrip(),
            _class(
                "Block(nn.Module)",
                net.block_init,
                _method(f"forward(self, {', '.join(net.block_arguments)})", net.block_forward),
            ),
            *([_class("Wide(Block)", *_wide(LINEAR[net.kind]))] if alternate else []),
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
