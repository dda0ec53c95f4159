"""Builds what a config group's choice describes: ``_target_`` called with the options beside it; and GPUs by name."""

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError

from ptdbench.problems import ConfigError, Problem, first_line, message_of, nearest, require, try_these, under
from ptdbench.setup import signature
from ptdbench.setup.config import Call, Config, conf_folder
from ptdbench.virtual.device import Device
from ptdbench.virtual.machine import Machine

T = TypeVar("T")
P = ParamSpec("P")

#: The class of a virtual GPU, as ``conf/virtual_options.yaml`` names it.
_DEVICE = f"{Device.__module__}.{Device.__name__}"

#: Hydra's own keywords among the options, which it does not pass on by name.
_OF_HYDRA = ("_args_", "_convert_", "_recursive_")

# Hydra logs failed imports; the problem raised here is clearer, and reported once.
logging.getLogger("hydra.utils").disabled = True

# Importing torchao, as transformers does, makes torch warn twice per process about something only torchao can change.
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant() on Enum" not in record.getMessage()
)


def build(config: Config, group: str) -> Any:
    """Build the object that a group's choice describes."""
    call = config.call(group)
    check(call, group)
    return guarded(group, instantiate, call.described)


def virtual(config: Config) -> Machine | None:
    """Return the machine with virtual GPUs, if the run uses any; the group is there only then."""
    if "virtual" not in config.resolved:
        return None
    if not isinstance(gpu := config.call("virtual").options.get("gpu", {}), Mapping):
        raise ConfigError([Problem("virtual.gpu", gpu, "is a group of options")])
    if gpu.get("_target_") == _DEVICE:  # built here to name its options in full, as they are typed
        _device({name: value for name, value in gpu.items() if name != "_target_"}, "virtual.gpu")
    machine: Machine = build(config, "virtual")
    return machine


def gpu_names() -> list[str]:
    """Return the names of all GPU models that ``virtual=`` takes."""
    return sorted(path.stem for path in (conf_folder() / "virtual").glob("*.yaml") if path.stem != "none")


def gpu(name: str) -> Device:
    """Return the GPU model of a name, or of a YAML file like those in ``conf/virtual``; composes no configuration.

    Raises:
        ConfigError: There is no such model or file, or its figures are impossible.
    """
    is_file = name.endswith((".yaml", ".yml"))
    if not is_file and name not in gpu_names():
        raise ConfigError([Problem("GPU", name, "no such GPU", try_these(nearest(name, gpu_names()) or gpu_names()))])
    try:
        figures = _figures(Path(name) if is_file else conf_folder() / "virtual" / f"{name}.yaml")
    except (OSError, OmegaConfBaseException, YAMLError, KeyError, TypeError, ValueError) as error:
        rule = f"describes no GPU: {first_line(error)}"
        raise ConfigError([Problem("GPU", name, rule, "see conf/virtual/h100.yaml for what it needs")]) from None
    return _device(figures, "gpu")


def _figures(path: Path) -> dict[str, Any]:
    """Return the figures of a file, including those it inherits from the models in its defaults."""
    written: Any = OmegaConf.to_container(OmegaConf.load(path))
    bases = [base for base in written.get("defaults", []) if base in gpu_names()]
    inherited = [item for base in bases for item in _figures(conf_folder() / "virtual" / f"{base}.yaml").items()]
    return {**dict(inherited), **written["gpu"]}


def _device(figures: Mapping[str, Any], group: str) -> Device:
    under(group, require, *signature.problems(Device, figures, group=group))
    return under(group, Device, **figures)


def bound(config: Config, group: str, *passed: str) -> Callable[..., Any]:
    """Return the function that a group's choice describes, with its options bound."""
    call = config.call(group)
    check(call, group, *passed)
    bound: Callable[..., Any] = guarded(group, instantiate, call.described | {"_partial_": True})
    return bound


def check(call: Call, group: str, *passed: str) -> Callable[..., Any]:
    """Return the callable of a group's choice, if Hydra allows it, after checking the options against its signature."""
    try:
        target: Callable[..., Any] = instantiate({"_target_": call.target, "_partial_": True}).func
    except Exception as error:  # an import may raise anything
        raise ConfigError([_not_found(f"{group}._target_", call.target, error)]) from None
    takes = signature.parameters(target)
    args = call.options.get("_args_")
    in_order = [name for name, parameter in takes.items() if parameter.kind in signature.IN_ORDER]
    by_order = in_order[: len(args)] if isinstance(args, list) else []
    held = _held_back(call, {name: parameter for name, parameter in takes.items() if name not in by_order})
    options = {name: value for name, value in call.options.items() if name not in _OF_HYDRA}
    passed = (*passed, *by_order, *(problem.option for problem in held))
    under(group, require, *held, *signature.problems(target, options, passed, group))
    return target


def _held_back(call: Call, takes: Mapping[str, inspect.Parameter]) -> list[Problem]:
    """Find parameters named ``name`` or ``label``, which identify a choice, that are given or required."""
    rule = "is ptdbench's name for the choice, and is not passed on"
    remedy = "wrap the callable in a function with another argument name"
    words = {"name": (call.name, not call.is_custom), "label": (call.label or "(not set)", call.label is not None)}
    return [
        Problem(word, value, rule, remedy)
        for word, (value, is_given) in words.items()
        if word in takes and (is_given or takes[word].default is inspect.Parameter.empty)
    ]


def _not_found(option: str, target: str, error: Exception) -> Problem:
    """Explain why a target is unavailable: its import raises, it is not callable, or it is on Hydra's blocklist."""
    if isinstance(error, InstantiationException) and error.__cause__ is None:
        refused = str(error).startswith("Expected a callable")
        rule = "must be a class or a function" if refused else f"Hydra refuses it: {' '.join(str(error).split())}"
        return Problem(option, target, rule)
    cause = error.__cause__ or error
    cause = cause.__cause__ or cause
    parent, _, name = target.rpartition(".")
    if isinstance(cause, ModuleNotFoundError) and cause.name == target and parent in sys.modules:
        close = nearest(name, vars(sys.modules[parent]))
        return Problem(option, target, f"{parent} has no {name}", try_these(f"{parent}.{near}" for near in close))
    remedy = "it is searched for in the current directory, in PYTHONPATH and among installed packages"
    return Problem(option, target, f"cannot be imported: {first_line(cause)}", remedy)


def guarded(group: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``make``; if it raises, raise a ConfigError that names the group."""
    try:
        return make(*args, **kwargs)
    except Exception as error:  # a third-party constructor may raise anything
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        if isinstance(cause, ConfigError):
            raise cause.under(group) from None
        rule, remedy = f"cannot be built: {message_of(cause)}", ""
        if isinstance(cause, InterpolationKeyError) and (absent := re.search(r"'((\w+)[^']*)'", rule)):
            rule, remedy = f"refer to {absent[1]}, which is not among the options", f"try another {absent[2]}"
        raise ConfigError([Problem(group, "(its options)", rule, remedy)]) from error
