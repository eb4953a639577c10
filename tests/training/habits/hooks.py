"""What a LightningModule says of itself: its hooks, optimizers and schedulers, and what its steps return."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.optim import lr_scheduler

from tests.training.habits.harness import Habits, Module, Net, Run

habit = Habits("The LightningModule")


# -- the order of things


NAMES = [
    *("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "optimizer_zero_grad", "on_train_batch_end", "on_validation_model_eval"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end"),
    *("on_validation_end", "on_validation_model_train", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
]


@habit("all hooks, in their order, while gradients are accumulated")
def in_order(run: Run) -> Any:
    calls: list[str] = []

    def noting(name: str) -> Any:
        own = getattr(Module, name)

        @functools.wraps(own)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(self, *args, **kwargs)

        return hook

    kind: Any = type("Noting", (Module,), {name: noting(name) for name in NAMES})
    return run.fit(kind(), num_sanity_val_steps=1, accumulate_grad_batches=2), calls


@habit.of_module("on_train_batch_start that ends the epoch by -1", {"max_epochs": 2}, long=True)
class Ends(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


@habit.of_module("trainer.should_stop in a step", {"max_epochs": 2}, long=True)
class Stops(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop |= batch_idx == 2
        return super().training_step(batch, batch_idx)


# -- gradients and optimizers


@habit.of_module("on_before_optimizer_step: grad_norm, and gradients looked at", long=True)
class Looks(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


@habit.of_module("configure_gradient_clipping", long=True)
class Clips(Module):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="norm")


@habit.of_module("optimizer_step: warming up, leaving steps out", long=True)
class WarmsUp(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)


class ByPlace(Module):
    """Rates that fall from layer to layer, as all parameters are counted."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [parameter], "lr": 0.02 * 0.8**place} for place, parameter in enumerate(self.net.parameters())
        ]
        return torch.optim.SGD(groups, momentum=0.9)


class ByModule(Module):
    """A group for each module that has parameters; Adagrad makes its state at once, and of names there are lists."""

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = []
        for part in self.net.modules():
            if own := [*part.named_parameters(recurse=False)]:
                groups.append({"params": own, "lr": 0.01 * (1 + len(groups))})
        return torch.optim.Adagrad(groups)


@habit("groups of parameters by their place in the module", long=True)
def by_place(run: Run) -> Any:
    return run.fit(ByPlace()), run.fit(ByModule())


@habit.of_module("configure_optimizers that returns None", long=True)
class NoOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return None


MANUAL = {"pp2": "ConfigurationError: .*manual optimization"}


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@habit.of_module("manual optimization", refused=MANUAL)
class Manual(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


@habit.of_module("manual optimization of a number that the module itself holds", refused=MANUAL, long=True)
class Tempered(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        network, temperature = self.optimizers()
        loss = F.mse_loss(self.net(batch["x"]) * self.temperature, batch["y"])
        self.manual_backward(0.5 * loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        network.step()
        network.zero_grad()
        if batch_idx % 2:  # accumulates
            temperature.step()
            temperature.zero_grad()
        self.log("train_loss", loss, sync_dist=True)
        self.log("temperature", self.temperature.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.02), torch.optim.SGD([self.temperature], lr=0.1)


@habit.of_module("two optimizers, toggled", refused=MANUAL, long=True)
class Rivals(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.other = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two = self.optimizers()
        for optimizer, sign in ((one, 1), (two, -1)):
            self.toggle_optimizer(optimizer)
            loss = (self.net(batch["x"]) + sign * self.other(batch["x"]) - batch["y"]).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss{sign}", loss.detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        of_other = torch.optim.Adam(self.other.parameters(), lr=0.01)
        return torch.optim.SGD(self.net.parameters(), lr=0.02), of_other


@habit.of_module("LBFGS", {"max_steps": 2}, refused={"pp2": "ConfigurationError: LBFGS"}, long=True)
class Searches(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


@habit.of_module("backward of one's own", refused={"pp2": "ConfigurationError: .*backward of its own"}, long=True)
class Goes(Module):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


# -- schedulers


def scheduled(make: Any, **options: Any) -> L.LightningModule:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            made = make(self, optimizer)
            return [optimizer], [{"scheduler": one, **options} for one in (made if isinstance(made, list) else [made])]

        def on_train_batch_end(self, *_: Any) -> None:
            self.log("rate", self.optimizers().param_groups[0]["lr"], on_epoch=True)

    return Scheduled()


@habit("ReduceLROnPlateau of a logged value", long=True)
def plateau(run: Run) -> Any:
    module = scheduled(
        lambda _, optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9), monitor="val_loss"
    )
    return run.fit(module, max_epochs=3)


@habit("OneCycleLR over trainer.estimated_stepping_batches", long=True)
def one_cycle(run: Run) -> Any:
    def make(module: Any, optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.05, int(module.trainer.estimated_stepping_batches))

    return run.fit(scheduled(make, interval="step"), max_epochs=2, accumulate_grad_batches=2)


@habit("several schedulers, SequentialLR, frequency", long=True)
def several_schedulers(run: Run) -> Any:
    def make(_: Any, optimizer: Any) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
        return [lr_scheduler.SequentialLR(optimizer, parts, [2]), lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return run.fit(scheduled(make, interval="step", frequency=2), max_epochs=2)


@habit("lr_scheduler_step", long=True)
def own_scheduler_step(run: Run) -> Any:
    module: Any = scheduled(lambda _, optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5))
    module.lr_scheduler_step = lambda scheduler, metric: (scheduler.step(), scheduler.step())
    return run.fit(module, max_epochs=2)


# -- steps and their batches


@habit.of_module("training_step that returns a dict; outputs in on_train_batch_end", long=True)
class Returns(Module):
    kept: tuple[Tensor, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "x": batch["x"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["x"], batch["x"])
        self.kept += (outputs["loss"],)

    def on_train_epoch_end(self) -> None:
        self.log("kept", torch.stack(self.kept).mean(), sync_dist=True)


@habit("validation_step that returns; outputs in on_validation_batch_end", long=True)
def returns_in_validation(run: Run) -> Any:
    seen: list[Any] = []

    class Returns(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"out": self.net(batch["x"])}

        def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
            seen.extend(run.in_order([*outputs["out"]]))

    return run.fit(Returns()), seen


@habit.of_module("on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer", long=True)
class Transfers(Module):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * 2}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return {key: value.to(device) for key, value in batch.items()}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "y": batch["y"] + 1}


@habit.of_module(
    "training_step that takes dataloader_iter",
    {"limit_val_batches": 0},
    refused={"pp2": "ConfigurationError: .*dataloader_iter"},
    long=True,
)
class Takes(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


# -- how it is made


@habit.of_module("configure_callbacks", {"max_epochs": 4}, long=True)
class Brings(Module):
    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=0, min_delta=10)]


@habit.of_module("configure_model", long=True)
class Late(Module):
    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.lr = 0.02

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(1)
            self.net = Net()


@habit("example_input_array, parts in eval mode, a buffer that a hook changes", long=True)
def has_more(run: Run) -> Any:
    class HasMore(Module):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(2, 4)
            self.register_buffer("count", torch.zeros(()))
            self.net.blocks[0].eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

    module = HasMore()
    return run.fit(module), float(module.count)
