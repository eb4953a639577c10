"""The network of a random module: its blocks, the loop over them, and what is before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from textwrap import indent

from tests.training.random_networks.pieces import (
    CLASSES,
    EMBEDDINGS,
    FIRST_OF,
    LAYERS,
    LINEAR,
    LOSSES,
    NORMS,
    OVER_POSITIONS,
    POOLED,
    RETURNS,
)

HOLDERS = {
    "list": "nn.ModuleList({made} for i in range({number}))",
    "Sequential": "nn.Sequential(*({made} for i in range({number})))",
    "a dict of blocks": "nn.ModuleDict({{f'block {{i}}': {made} for i in range({number})}})",
    "groups of blocks": "nn.ModuleList(nn.ModuleList({made} for i in range(2)) for _ in range({number} // 2))",
    "shared blocks": "nn.ModuleList([Block(), Block()] * ({number} // 2))",
}
"""Source text that makes a network's blocks, by how it holds them."""


@dataclass
class Network:
    """The lines of a network's parts, filled by the functions below in their order."""

    random: Random
    kind: str
    number: int
    is_module: bool
    """Whether the LightningModule itself is the network."""
    block_init: list[str] = field(default_factory=list)
    block_forward: list[str] = field(default_factory=list)
    block_arguments: list[str] = field(default_factory=lambda: ["h"])
    block_call: list[str] = field(default_factory=lambda: ["h"])
    init: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    loop: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    module_init: list[str] = field(default_factory=list)
    before_call: list[str] = field(default_factory=list)
    step: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    methods: list[list[str]] = field(default_factory=list)
    terms: dict[str, str] = field(default_factory=dict)
    """By name, expressions of what is added to the loss."""
    measure: str = "y.detach().mean()"
    returns: str = "tensor"
    unpacks: list[str] = field(default_factory=list)
    holder: str = "list"
    batch: str = "dict"
    is_conditioned: bool = False
    layer: str = ""
    loss: str = ""
    is_per_token: bool = False
    head: str = ""
    output: str = "tensor"

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    @property
    def unpack(self) -> list[str]:
        """Lines that take a batch apart."""
        return {
            "dict": ["x, y, cond, side, weight = (batch[key] for key in ('x', 'y', 'cond', 'side', 'weight'))"],
            "tuple": ["x, y, cond, side, weight = batch"],
            "nested": ["(x, cond), more = batch", "y, [side, weight] = more['y'], more['others']"],
        }[self.batch]

    @property
    def net(self) -> str:
        return "self" if self.is_module else "self.net"


def embedding(net: Network) -> None:
    net.init.append(f"self.embed = {EMBEDDINGS[net.kind]}")
    net.before.append("h = self.embed(x)")
    if net.kind == "tokens" and net.chance(0.5):
        made = "torch.randn(1, 6, D) * 0.1"
        is_trained = net.chance(0.5)
        net.init.append(
            f"self.position = nn.Parameter({made})" if is_trained else f"self.register_buffer('position', {made})"
        )
        net.before.append("h = h + self.position[:, : h.shape[1]]")
    elif net.kind == "tokens" and net.chance(0.3):
        net.init.append("self.positions = nn.Embedding(6, D)")
        net.before.append("h = h + self.positions(torch.arange(x.shape[1], device=x.device))")
    between = [None, None, None, None, "h = scaled(h)", "h = Halved.apply(h)", "h.register_hook(lambda g: g * 0.9)"]
    if (line := net.random.choice(between)) is not None:
        net.before.append(line if "hook" not in line else f"if h.requires_grad:\n            {line}")
    if net.chance(0.25):
        net.init.append(f"self.stem = {NORMS[net.kind]}")
        net.before.append("h = self.stem(h)")


def layers(net: Network) -> None:
    net.layer = net.random.choice([*LAYERS[net.kind]])
    init, forward = LAYERS[net.kind][net.layer]
    net.block_init += init
    net.block_forward += forward
    over = "[:, None, None]" if net.kind == "images" else ""
    more = {
        "in place": ([], ["h = h + 0", "h += 0.1 * y"]),
        "a cache": (
            ["self.cache = None"],
            ["if self.cache is None:", "    self.cache = torch.linspace(0, 1, D)", f"y = y + self.cache{over}"],
        ),
        "a checkpoint": (
            [f"self.inner = {LINEAR[net.kind]}"],
            ["y = torch.utils.checkpoint.checkpoint(self.inner, y, use_reentrant=False)"],
        ),
        "a number": (["self.mean = 0.0"], ["self.mean = float(y.detach().mean())"]),
        "a frozen layer": (
            [f"self.fixed = {LINEAR[net.kind]}.requires_grad_(False)"],
            ["y = y + 0.1 * self.fixed(y)"],
        ),
        "a scale": (["self.scale = nn.Parameter(torch.ones(()))"], ["y = y * self.scale"]),
        "a gradient's hook": ([], ["if y.requires_grad:", "    y.register_hook(lambda gradient: 0.9 * gradient)"]),
        "a function of one's own": ([], ["y = Halved.apply(y)"]),
        "a compiled function": ([], ["y = scaled(y)"]),
        "a normed weight": (
            [f"self.normed = nn.utils.parametrizations.weight_norm({LINEAR[net.kind]})"],
            ["y = y + 0.1 * self.normed(y)"],
        ),
    }
    for init, forward in more.values():
        if net.chance(0.12):
            net.block_init += init
            net.block_forward += forward


def arguments(net: Network) -> None:
    over = OVER_POSITIONS[net.kind]
    if net.chance(0.3):
        net.is_conditioned = True
        net.init.append("self.condition = nn.Linear(3, D)")
        net.before.append(net.random.choice(["c = self.condition(cond)", "c = F.silu(self.condition(cond))"]))
        net.block_arguments.append("c")
        net.block_call.append(net.random.choice(["c", "c=c"]))
        if net.chance(0.5):
            net.block_init.append("self.film = nn.Linear(D, D)")
            net.block_forward.append(f"y = y + self.film(c){over}")
        else:
            net.block_forward.append(f"y = y * (1 + c){over}")
    if net.chance(0.2):
        net.block_arguments.append("scale=1.0")
        net.block_call.append("scale=0.5")
        net.block_forward.append("y = y * scale")
    if net.kind == "tokens" and net.chance(0.2):
        net.before.append("mask = (x != 0)[..., None]")
        net.block_arguments.append("mask=None")
        net.block_call.append("mask=mask")
        net.block_forward.append("y = y * mask")
    if net.chance(0.12):
        each = "[:, None, None]" if net.kind == "images" else ""
        angles = "torch.arange(D, dtype=h.dtype).mul(0.1)"
        net.before.append(f"rotation = ({angles}.cos(), {angles}.sin())")
        net.block_arguments.append("rotation=None")
        net.block_call.append("rotation=rotation")
        net.block_forward.append(f"y = y * rotation[0]{each} + rotation[1]{each}")


def what_blocks_return(net: Network) -> None:
    net.returns = net.random.choice([*RETURNS, *["tensor"] * 4])


def what_blocks_keep(net: Network) -> None:
    kind = net.random.choice([None, None, None, "attribute", "list attribute", "list", "dict", "hook", "returned"])
    measure = net.random.choice(["y.pow(2).mean()", "y.abs().mean()", "(y - h).pow(2).mean()"])
    if net.chance(0.3):
        measure = measure.replace(".mean()", ".detach().mean()")
    blocks = f"{net.net}.blocks"
    if kind == "attribute":
        net.block_init.append("self.measure = None")
        net.block_forward.append(f"self.measure = {measure}")
        net.terms["kept"] = f"sum(block.measure for block in {blocks})"
    elif kind == "list attribute":
        net.block_forward.append(f"self._measures = [{measure}]")
        net.terms["kept"] = f"sum(block._measures[0] for block in {blocks})"
    elif kind in ("list", "dict"):
        net.block_arguments.append("seen=None")
        net.block_call.append("seen=seen")
        fill = f"seen.append({measure})" if kind == "list" else f"seen['sum'] = seen.get('sum', 0.0) + {measure}"
        net.block_forward.append(fill)
        net.before.append("seen = []" if kind == "list" else "seen = {}")
        net.after.append("self.seen = seen")
        net.terms["kept"] = f"sum({net.net}.seen)" if kind == "list" else f"{net.net}.seen['sum']"
    elif kind == "hook":
        net.module_init += ["self.features = []", f"for block in {blocks}:"]
        net.module_init.append("    block.register_forward_hook(self._collect)")
        of = FIRST_OF[net.returns]
        net.methods.append(
            ["def _collect(self, module, args, output):", f"    self.features.append(output{of}.pow(2).mean())"]
        )
        net.before_call.append("self.features.clear()")
        net.terms["kept"] = "sum(self.features) / len(self.features)"
    elif kind == "returned":
        net.returns = net.random.choice(["tuple", "dict", "named tuple"])
        net.measure = measure
        net.before.append("total = 0.0")
        net.unpacks.append("total = total + measure")
        net.after.append("self.total = total")
        net.terms["kept"] = f"{net.net}.total"
    returned, unpacks = RETURNS[net.returns]
    net.block_forward.append(returned.format(measure=net.measure))
    call = f"block({', '.join(net.block_call)})"
    net.unpacks[:0] = [line.format(call=call) for line in unpacks]


def loop(net: Network) -> None:
    random, number, pooled = net.random, net.number, POOLED[net.kind]
    at, cut = random.randrange(number), random.randrange(1, number)
    run = indent("\n".join(net.unpacks), "    ").split("\n")
    each = ["for block in self.blocks:", *run]
    numbered = ["for i, block in enumerate(self.blocks):", *run]
    halves = [f"for block in self.blocks[:{cut}]:", *run], [f"for block in self.blocks[{cut}:]:", *run]
    kinds: dict[str, tuple[list[str], list[str]]] = {
        "plain": ([], each),
        "by number": ([], ["for i in range(len(self.blocks)):", "    block = self.blocks[i]", *run]),
        "a layer between": (
            [f"self.middle = {LINEAR[net.kind]}"],
            [*numbered, f"    if i == {at}:", "        h = h + self.middle(h)"],
        ),
        "a sum of some": ([], ["hs = [h]", *each, "    hs.append(h)", f"h = h + hs[{at}] + hs[-2]"]),
        "a learned sum": (
            [f"self.mix = nn.Parameter(torch.zeros({number + 1}))"],
            [
                "hs = [h]",
                *each,
                "    hs.append(h)",
                "h = (torch.stack(hs) * self.mix.softmax(0).view(-1, *[1] * h.ndim)).sum(0)",
            ],
        ),
        "scales": (
            [f"self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range({number}))"],
            [*numbered, "    h = h * self.scales[i]"],
        ),
        "norms": (
            [f"self.norms = nn.ModuleList({NORMS[net.kind]} for _ in range({number}))"],
            ["for block, norm in zip(self.blocks, self.norms):", "    h = norm(h)", *run],
        ),
        "one norm": ([f"self.pre = {NORMS[net.kind]}"], [each[0], "    h = self.pre(h)", *run]),
        "skips": (
            [],
            [
                "skips = []",
                "for block in self.blocks[: len(self.blocks) // 2]:",
                *run,
                "    skips.append(h)",
                "for block in self.blocks[len(self.blocks) // 2 :]:",
                "    if skips:",
                "        h = h + skips.pop()",
                *run,
            ],
        ),
        "two halves": ([], [*halves[0], "first = h", *halves[1], "h = h + first"]),
        "a memory": (
            [],
            [
                *halves[0],
                f"memory = torch.tanh(h{pooled}){OVER_POSITIONS[net.kind]}",
                halves[1][0],
                "    h = h + memory",
                *run,
            ],
        ),
        "dense": (
            [],
            ["outs = {}", numbered[0], "    if i >= 2:", "        h = h + 0.1 * outs[i - 2]", *run, "    outs[i] = h"],
        ),
        "the input again": ([], ["start = h", each[0], "    h = h + 0.1 * start", *run]),
        "while": ([], ["i = 0", "while i < len(self.blocks):", "    block = self.blocks[i]", *run, "    i += 1"]),
        "detached": ([], [*numbered, f"    if i == {cut}:", "        h = h.detach()"]),
        "a compiled function between": ([], [*each, "    h = scaled(h)"]),
        "a function of one's own between": ([], [*each, "    h = Halved.apply(h)"]),
        "a head for each": (
            [f"self.heads = nn.ModuleList(nn.Linear(D, 5) for _ in range({number}))"],
            [
                "logits = []",
                "for block, head in zip(self.blocks, self.heads):",
                *run,
                f"    logits.append(head(h{pooled}))",
                "self.logits = logits",
            ],
        ),
        "a head beside": (
            ["self.side = nn.Linear(D, 5)"],
            [*numbered, f"    if i == {at}:", "        kept = h", f"self.side_logits = self.side(kept{pooled})"],
        ),
    }
    if not net.terms:
        kinds["a dict of blocks"] = ([], ["for name, block in self.blocks.items():", *run])
        inner = ["    " + line for line in each]
        kinds["groups of blocks"] = (
            [],
            ["for group in self.blocks:", *(line.replace("self.blocks", "group") for line in inner)],
        )
        kinds["two lists"] = (
            [f"self.decoder = nn.ModuleList(Block() for i in range({number}))"],
            [
                *each,
                "memory = h",
                "h = 0.5 * h",
                *(line.replace("self.blocks", "self.decoder") for line in each),
                "h = h + memory",
            ],
        )
        kinds["shared blocks"] = ([], each)
    if net.returns == "tensor" and len(net.block_call) == 1:
        kinds["Sequential"] = ([], ["h = self.blocks(h)"])
        kinds["parts of Sequential"] = (
            [],
            [f"middle = self.blocks[:{cut}](h)", f"h = middle + self.blocks[{cut}:](middle)"],
        )
    kind = random.choice([*kinds])
    init, net.loop = kinds[kind]
    net.init += init
    net.holder = kind if kind in HOLDERS else "Sequential" if "Sequential" in kind else "list"
    if kind == "a head for each":
        net.terms["deep"] = f"sum(F.cross_entropy(logits, side) for logits in {net.net}.logits) / {number}"
    if kind == "a head beside":
        net.terms["beside"] = f"F.cross_entropy({net.net}.side_logits, side)"


def head(net: Network) -> None:
    if net.chance(0.6):
        net.init.append(f"self.final = {NORMS[net.kind]}")
        net.after.append("h = self.final(h)")
    net.loss = net.random.choice([*LOSSES])
    net.is_per_token = net.kind == "tokens" and net.chance(0.6)
    if not net.is_per_token:
        net.after.append(f"h = h{POOLED[net.kind]}")
    number = CLASSES[net.kind]
    heads = ["linear", "deep"]
    if net.kind == "tokens":
        heads += ["tied", "tied by hand"]
    if not net.is_module:
        heads.append("on the module")
    net.head = net.random.choice(heads)
    if net.head == "tied":
        net.init += ["self.head = nn.Linear(D, 20, bias=False)", "self.head.weight = self.embed.weight"]
    elif net.head == "linear":
        net.init.append(f"self.head = nn.Linear(D, {number})")
    elif net.head == "deep":
        net.init.append(f"self.head = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, {number}))")
    elif net.head == "on the module":
        net.module_init.append(f"self.head = nn.Linear(D, {number})")
    computed = {"tied by hand": "F.linear(h, self.embed.weight)", "on the module": "h"}.get(net.head, "self.head(h)")
    net.after.append(f"out = {computed}")
    net.output = "tensor" if net.is_module else net.random.choice(["tensor", "tensor", "tuple", "dict"])
    net.after.append(
        {"tensor": "return out", "tuple": "return out, h", "dict": "return {'out': out, 'h': h}"}[net.output]
    )
