"""``lightning-shard plan``: plans a layout, or searches for one, for a recipe or a module that a function builds."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.installed import need_recipes, own_conf, recipes

if TYPE_CHECKING:
    from lightning_shard.dryrun.planned import Plan
    from lightning_shard.dryrun.search.found import Found

_SIZES = {
    "pipeline": "pipeline_parallel_size",
    "data": "data_parallel_size",
    "replicas": "data_parallel_replicas",
    "tensor": "tensor_parallel_size",
    "expert": "expert_parallel_size",
}
_OF_STRATEGY = (
    "microbatches",
    "schedule",
    "placement",
    "pipeline_blocks",
    "tensor_parallel_plan",
    "expert_parallel_plan",
    "activation_checkpointing",
    "cpu_offload",
    "reduce_each_microbatch",
    "reshard_after_forward",
)
"""Settings of the strategy, other than axis sizes, that a plan depends on."""


def add_plan(verbs: Any, size: Callable[[str], int]) -> None:
    """Add the verb ``plan`` to a command line; ``size`` parses sizes such as ``80GiB``."""
    summary = "say what a layout takes, before it is run: memory, time, checkpoints; or search for one"
    parser = verbs.add_parser("plan", help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(verb=_plan)
    parser.add_argument(
        "what",
        nargs="+",
        help="recipe=NAME and other settings of recipes/train.py, key=value; or package.module:function, which gives a"
        " LightningModule and a batch of one data-parallel rank",
    )
    for name, setting in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=setting)
    parser.add_argument("--microbatches", type=int, metavar="N", help="of a batch")
    parser.add_argument("--schedule", help="a name such as 1F1B, an order.csv, or auto")
    parser.add_argument("--placement", type=_value, help='"auto", "even", or counts such as [3,5,5,3]')
    parser.add_argument("--pipeline-blocks", type=_value, help='names of lists of blocks: layers, or ["down", "up"]')
    for name, style in (("tensor-parallel-plan", "colwise"), ("expert-parallel-plan", "experts")):
        text = f"""patterns of names to styles, as '{{"layers.*.name": "{style}"}}', or a plan.yaml with these"""
        parser.add_argument(f"--{name}", metavar="PLAN", type=_value, help=text)
    parser.add_argument("--activation-checkpointing", type=_value, metavar="X", help='true, a number, or "selective"')
    for name in ("cpu-offload", "reduce-each-microbatch", "reshard-after-forward"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help="as the strategy's")
    parser.add_argument("--precision", help="the Trainer's, such as bf16-mixed")
    parser.add_argument("--accumulate-grad-batches", type=int, metavar="N", help="the Trainer's")
    parser.add_argument("--device-memory", type=size, metavar="SIZE", help="of each device, such as 80GiB")
    parser.add_argument("--device-type", help="cuda if nothing is said; or cpu")
    parser.add_argument("--asynchronous-saving", action=argparse.BooleanOptionalAction, help="checkpoints by a thread")
    parser.add_argument("--device", metavar="NAME", help="time a step: h100, a100-80gb, …, or a profile.yaml")
    parser.add_argument("--search", action="store_true", help="the fastest layouts of --devices instead of one")
    parser.add_argument("--devices", type=int, metavar="N", help="for --search: how many there are")
    parser.add_argument(
        "--global-batch", type=int, metavar="N", help="for --search: samples of a step, of all devices together"
    )
    parser.add_argument("--most", type=int, default=10, metavar="N", help="for --search: how many to list (10)")
    parser.add_argument(
        "--recipes",
        type=Path,
        default=recipes(),
        metavar="FOLDER",
        help="where train.py is, conf/ beside it (those that are installed)",
    )
    parser.add_argument("--html", metavar="FILE", help="write the table and the timeline as a page")
    parser.add_argument("--trace", metavar="FILE", help="write timeline and memory as JSON that ui.perfetto.dev opens")
    parser.add_argument("--json", action="store_true", help="print JSON for machines instead of a table")


def _plan(arguments: argparse.Namespace) -> tuple[Any, int]:
    with contextlib.redirect_stdout(sys.stderr):  # keep what user code prints out of the answer
        return _answer(arguments)


def _answer(arguments: argparse.Namespace) -> tuple[Any, int]:
    """What to print, a text or values for JSON; and the exit code."""
    from lightning_shard.dryrun.planning import plan
    from lightning_shard.dryrun.timing.devices import read_yaml

    function = next((what for what in arguments.what if ":" in what and "=" not in what), None)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if function is not None:
        settings = dict(_settings_of_function(function, arguments))
    else:
        settings = dict(_settings_of_recipe(arguments.what, arguments.recipes))
    sizes = {setting: given[name] for name, setting in _SIZES.items() if name in given}
    settings["layout"] = _sizes({**settings.pop("layout", {}), **sizes}, settings.pop("world_size", None))
    if "data" in settings:
        settings["batch"] = _first_batch(settings.pop("data"), settings["layout"]["data_parallel_size"])
    trainers = ("precision", "accumulate_grad_batches", "device_memory", "device_type", "asynchronous_saving", "device")
    settings.update((name, given[name]) for name in (*_OF_STRATEGY, *trainers) if name in given)
    for name in ("tensor_parallel_plan", "expert_parallel_plan"):
        if isinstance(settings.get(name), str):
            settings[name] = read_yaml(settings[name], name)
    if arguments.search:
        return _search(arguments, settings)
    made = plan(settings.pop("module"), settings.pop("batch"), **settings)
    return _said(made, arguments), 1 if made.fits is False else 0


def _said(made: Plan | Found, arguments: argparse.Namespace) -> Any:
    from lightning_shard.dryrun.pictures import save

    save(made, arguments.html, arguments.trace)
    return made.to_json() if arguments.json else str(made)


def _search(arguments: argparse.Namespace, settings: dict[str, Any]) -> tuple[Any, int]:
    from lightning_shard import tree
    from lightning_shard.dryrun.search.search import search_module

    for name in ("devices", "device"):
        if getattr(arguments, name) is None:
            raise ConfigurationError(f"--search needs --{name}: say it, such as --devices 512 --device h100.")
    if settings.get("cpu_offload"):
        raise ConfigurationError(
            "cpu_offload=True can't be searched, since an optimizer's step on the host isn't timed: leave it out, and"
            " plan the layout that was found with it."
        )
    batch = settings["batch"]
    known = inspect.signature(search_module).parameters
    found = search_module(
        settings["module"],
        batch,
        devices=arguments.devices,
        global_batch=arguments.global_batch or tree.batch_size(batch) * settings["layout"]["data_parallel_size"],
        most=arguments.most,
        **{name: value for name, value in settings.items() if name in known and name not in ("module", "batch")},
    )
    return _said(found, arguments), 0 if found.choices else 1


def _sizes(sizes: Mapping[str, Any], world: int | None) -> dict[str, int]:
    """Axis sizes; ``data_parallel_size`` "auto" is resolved to the rest of ``world`` ranks."""
    found = dict(sizes)
    if found.get("data_parallel_size", "auto") == "auto":
        names = ("pipeline_parallel_size", "tensor_parallel_size")
        ranks = math.prod(max(1, found.get(name, 1)) for name in names)  # the layout refuses invalid sizes
        if world is not None and world % ranks:
            both = " × ".join(f"{name} ({found.get(name, 1)})" for name in names)
            raise ConfigurationError(
                f"{both} must divide the {world} devices: use sizes whose product does, or another number of devices."
            )
        found["data_parallel_size"] = (world or ranks) // ranks
    return found


def _settings_of_function(name: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    if len(arguments.what) > 1:
        raise ConfigurationError(f"{name} is planned with options (--pipeline 8), not with {arguments.what[1:]}.")
    from lightning_shard.dryrun.counting.fake import built_on_meta

    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise ConfigurationError(f"{name!r} names no function: name one as package.module:function.")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(path)
    except Exception as error:  # from the user's code
        raise ConfigurationError(
            f"{path} can't be imported ({type(error).__name__}: {error}): run this in the folder from which it can, or"
            " correct it; a function is named as package.module:function."
        ) from error
    build = getattr(module, attribute, None)
    if not callable(build):
        raise ConfigurationError(f"{path} has no function {attribute!r}: name one as package.module:function.")
    made = built_on_meta(build)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigurationError(
            f"{name} returns {type(made).__name__}, and not a pair: return a LightningModule and the batch that one"
            " data-parallel rank reads for a step."
        )
    yield from zip(("module", "batch"), made)


def _settings_of_recipe(overrides: list[str], recipes: Path) -> Iterator[tuple[str, Any]]:
    """Yield a plan's settings: what ``recipes/train.py`` would train with these overrides."""
    need_recipes()
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if unclear := [override for override in overrides if "=" not in override]:
        raise ConfigurationError(
            f"{' '.join(unclear)} is neither a setting of a recipe, key=value such as recipe=demo, nor a function that"
            " builds a module, package.module:function."
        )
    folder = recipes.resolve().parent / "conf"
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} isn't there: --recipes names the folder recipes/ beside it; or plan a function's module by"
            " package.module:function."
        )
    sys.path.insert(0, str(recipes.resolve()))
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            own = own_conf()
            config = compose("config", [*overrides, *([f"hydra.searchpath=[file://{own}]"] if own else [])])
        strategy: Any = OmegaConf.to_container(config.strategy, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).partition("Config search path")[0].split())
        raise ConfigurationError(
            f"These settings make no recipe: {reason} Settings are those of {folder}, as key=value."
        ) from error
    sizes = (*_SIZES.values(), "context_parallel_size")  # which a plan refuses
    yield "layout", {setting: strategy[setting] for setting in sizes if setting in strategy}
    for name in _OF_STRATEGY:
        if name in strategy:
            yield name, strategy[name]
    trainer: Any = config.trainer
    if not isinstance(trainer.devices, int) or trainer.devices < 1:
        raise ConfigurationError(
            f"trainer.devices={trainer.devices} isn't a number of devices: say how many there are to be, such as"
            " trainer.devices=8 trainer.num_nodes=64."
        )
    yield "world_size", trainer.devices * trainer.num_nodes
    yield "precision", str(trainer.precision)
    yield "accumulate_grad_batches", trainer.accumulate_grad_batches
    yield "asynchronous_saving", bool(strategy.get("checkpoint_io", {}).get("asynchronous"))

    def model() -> Any:
        return instantiate(config.model)

    yield "module", model
    try:
        data = instantiate(config.data)
    except HydraException as error:
        raise ConfigurationError(f"The recipe's data can't be made: {str(error).splitlines()[0]}") from error
    yield "data", data


def _first_batch(data: Any, ranks: int) -> Any:
    """The first training batch of a data module, as one of ``ranks`` data-parallel ranks reads it."""
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": 0})
    try:
        data.prepare_data()
        data.setup("fit")
        return next(iter(data.train_dataloader()))
    except ShardError:
        raise
    except Exception as error:  # from the recipe's code, or missing data
        raise ConfigurationError(
            f"The recipe's first batch can't be read ({type(error).__name__}: {error}): a plan needs its shapes. Have"
            " the data there, use data=random_tokens, or name a function that returns a module and a batch."
        ) from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
