"""The steps and hooks of a random module."""

from __future__ import annotations

from textwrap import indent

from tests.training.random_networks.network import Network
from tests.training.random_networks.pieces import CLASSES, LOSSES, OF_CLASSES


def step(net: Network) -> None:
    random = net.random
    flat = net.is_per_token and net.loss in OF_CLASSES
    pred, y = ("pred.flatten(0, -2)", "y.flatten()") if flat else ("pred", "y")
    loss = LOSSES[net.loss].format(pred=pred, y=y)
    net.step += [*net.before_call, *_call(net, "pred")]
    if net.chance(0.15):
        net.module_init.append("self.temperature = nn.Parameter(torch.tensor(0.5))")
        net.step.append("pred = pred * self.temperature.exp()")
    if net.chance(0.15):
        net.module_init.append("self.criterion = Criterion()")
        loss = f"self.criterion({loss})"
    net.step.append(f"loss = {loss}")
    for name, term in net.terms.items():
        net.step += [f"{name} = {term}", f"loss = loss + 0.3 * {name}"]
    factor = random.choice([None, None, None, "(1 + 0.1 * self.global_step)", "(1 + self.current_epoch)"])
    if factor:
        net.step.append(f"loss = loss * {factor}")
    if net.chance(0.15):
        net.step.append("loss = loss + 0.1 * (pred.flatten(1).norm(dim=1) * weight).mean()")
    logs = {
        "the loss": ["self.log('train_loss', loss)"],
        "of epochs": ["self.log('train', loss, on_step=True, on_epoch=True, prog_bar=True)"],
        "several": ["self.log_dict({'a': loss, 'b': pred.detach().abs().mean()}, on_epoch=True)"],
        "every second": ["if batch_idx % 2 == 0:", "    self.log('even', loss)"],
        "a count": ["self.log('samples', len(x), reduce_fx='sum', on_step=False, on_epoch=True, sync_dist=True)"],
        "a rate": ["self.log('rate', self.optimizers().param_groups[0]['lr'])"],
        **({"a term": [f"self.log('term', {next(iter(net.terms))}, on_epoch=True)"]} if net.terms else {}),
    }
    for log in random.sample([*logs], 2):
        net.logs += logs[log]
    if net.loss in OF_CLASSES and net.chance(0.3):
        number = CLASSES[net.kind]
        net.module_init.append(f"self.accuracy = MulticlassAccuracy({number}, average='micro')")
        net.logs += [f"self.accuracy({pred}, {y})", "self.log('accuracy', self.accuracy, on_step=False, on_epoch=True)"]
    validations = {
        "a log": ["self.log('val_loss', loss, prog_bar=True)"],
        "a metric": ["self.mean.update(loss, weight=len(x))", "self.log('val_mean', self.mean)"],
        "a list": ["self.losses.append(loss.detach())", "return pred"],
        "a second call": [
            *_call(net, "again"),
            "self.log('again', (again - again.mean(-1, keepdim=True)).pow(2).mean())",
        ],
    }
    if "seen" in net.terms.get("kept", "") or "total" in net.terms.get("kept", ""):
        validations["a second call"].append(f"self.log('val_kept', {net.terms['kept']})")
    validation = random.choice([None, *validations])
    if validation:
        lines = indent("\n".join([*net.step, *validations[validation]]), "    ").split("\n")
        net.methods.append(
            ["def validation_step(self, batch, batch_idx):", *("    " + line for line in net.unpack), *lines]
        )
    if validation == "a metric":
        net.module_init.append("self.mean = MeanMetric()")
    if validation == "a list":
        net.module_init.append("self.losses = []")
        lines = ["    self.log('val_epoch', torch.stack(self.losses).mean())", "    self.losses.clear()"]
        net.methods.append(["def on_validation_epoch_end(self):", *lines])
    if net.chance(0.3):
        lines = [*net.unpack, *net.before_call, *_call(net, "pred"), "return pred"]
        net.methods.append(["def predict_step(self, batch, batch_idx):", *("    " + line for line in lines)])


def _call(net: Network, name: str) -> list[str]:
    call = f"self{'' if net.is_module or net.chance(0.5) else '.net'}(x{', cond' * net.is_conditioned})"
    lines = {
        "tensor": [f"{name} = {call}"],
        "tuple": [f"{name}, hidden = {call}"],
        "dict": [f"out = {call}", f"{name}, hidden = out['out'], out['h']"],
    }[net.output]
    return [*lines, *([f"{name} = self.head({name})"] if net.head == "on the module" else [])]


def hooks(net: Network) -> None:
    known = {
        "a norm": [
            "def on_before_optimizer_step(self, optimizer):",
            "    self.log('norm', torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))",
        ],
        "a log": [
            "def on_train_batch_end(self, outputs, batch, batch_idx):",
            "    self.log('later', outputs['loss'] * 2)",
        ],
        "a count": ["def on_train_batch_start(self, batch, batch_idx):", "    self.steps += 1"],
        "smaller weights": [
            "def on_train_batch_end(self, outputs, batch, batch_idx):",
            "    with torch.no_grad():",
            "        for name, q in self.named_parameters():",
            "            if not name.endswith('bias'):",
            "                q.mul_(0.999)",
        ],
    }
    steps = {
        "warm-up": [
            "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):",
            "    for group in optimizer.param_groups:",
            "        group['lr'] = 1e-3 * min(1.0, (self.global_step + 1) / 3)",
            "    optimizer.step(closure=optimizer_closure)",
        ],
        "own clipping": [
            "def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):",
            "    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)",
        ],
        "scaled gradients": [
            "def on_before_optimizer_step(self, optimizer):",
            "    for group in optimizer.param_groups:",
            "        for q in group['params']:",
            "            if q.grad is not None:",
            "                q.grad.mul_(0.5)",
        ],
    }
    own_step = net.random.choice([None, None, None, *steps])
    if own_step:
        net.methods.append(steps[own_step])
    if own_step == "scaled gradients":
        del known["a norm"]
    hook = net.random.choice([None, None, *known])
    if hook:
        net.methods.append(known[hook])
    if hook == "a count":
        net.module_init.append("self.register_buffer('steps', torch.zeros((), dtype=torch.long))")
    frozen = {
        "embedding": [f"{net.net}.embed.requires_grad_(False)"] if not net.head.startswith("tied") else [],
        "biases": ["for name, q in self.named_parameters():", "    q.requires_grad_(not name.endswith('bias'))"],
    }
    net.module_init += frozen.get(net.random.choice([None, None, *frozen]), [])
